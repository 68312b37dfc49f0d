"""How far a run had come in its prompts, as its checkpoints keep it for the checks before a resume."""


def position(client_state: dict) -> dict:
    """{"drawn", "episode"}: prompts that a resume passes over, and the episode in which it first does; {} where a state has none.

    client_state: what OpenRLHF's trainer keeps with a checkpoint.
    """
    drawn = _drawn(client_state.get("data_loader_state_dict") or {})
    if drawn is None or "episode" not in client_state:
        return {}
    rollout = client_state.get("rollout") or {}
    trained_from_buffer = rollout.get("exhausted") and rollout.get("sample_buffer")  # the episode's rest is sampled already
    return {"drawn": drawn, "episode": client_state["episode"] + bool(trained_from_buffer)}


def _drawn(state: dict) -> int | None:
    """The sampler's count in the state of a ``StatefulDataLoader``, which has it deeper with workers than without."""
    if "_sampler_iter_yielded" in state:
        return state["_sampler_iter_yielded"]
    inner = (_drawn(value) for value in state.values() if isinstance(value, dict))
    return next((count for count in inner if count is not None), None)
