"""What a checkpoint was written of, and what a run must share with it to load it."""

# Role is "actor" or "critic"; the words name what a user would change.
FACTS = {
    "zero_stage": "--ds.zero_stage",
    "world_size": "--{role}.num_nodes x --{role}.num_gpus_per_node",
    "scheme": "--quant.scheme",
    "optimizer": "--{role}.optim",
    "state_bits": "--{role}.adam.state_bits",
    "lora_rank": "--ds.lora.rank",
}
SHAPE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "num_experts", "moe_intermediate_size",
)  # fmt: skip


def facts_of(args, role: str, config) -> dict:
    """{"scheme", "optimizer", "model", ...} of one trained model, without those of its layout on the processes.

    Args:
        args: nested arguments; role: "actor" or "critic"; config: the model's Hugging Face config.
    """
    own, text = getattr(args, role), config.get_text_config()
    shape = {name: getattr(text, name, None) for name in SHAPE}
    return {
        "scheme": args.quant.scheme,
        "optimizer": own.optim,
        "state_bits": own.adam.state_bits,
        "lora_rank": args.ds.lora.rank,
        "model": {name: value for name, value in shape.items() if value is not None},
    }


def difference(written: dict, facts: dict, role: str) -> str | None:
    """Why a checkpoint with facts ``written`` cannot be loaded by a run with ``facts``; None if it can.

    What either does not have (an older checkpoint) is taken for equal.
    """
    for name, words in FACTS.items():
        if name in written and name in facts and written[name] != facts[name]:
            reason = "a run keeps its scheme" if name == "scheme" else "DeepSpeed loads a checkpoint only as it was written"
            return (
                f"was written with {words.format(role=role)} {written[name]}, this run has {facts[name]}: {reason}; "
                f"resume with {written[name]}, or start anew from an export (cli.export)"
            )
    before, now = written.get("model") or {}, facts.get("model") or {}
    other = [name for name in SHAPE if name in before and name in now and before[name] != now[name]]
    if other:
        return (
            f"was written of a model with {', '.join(f'{name} {before[name]}' for name in other)}; --{role}.model_name_or_path of this run "
            f"has {', '.join(str(now[name]) for name in other)}: give the model that the run began with, or another --ckpt.path to start anew"
        )
    return None
