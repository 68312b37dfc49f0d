"""Do the sequence bands fit the responses? Said once, when the first rollout shows how long they are."""

from qarl_openrlhf.objectives import find_spec, short_response_band_scale


def band_scale_line(samples: list, args) -> str | None:
    """One line on ``--objective.band_scale`` and the measured mean length; None for objectives without one."""
    if not args.objective.name:
        return None
    known = find_spec(args.objective.name).hyperparameters
    lengths = [int(sample.action_mask.sum()) for sample in samples]
    if "band_scale" not in known or not sum(lengths):
        return None
    scale = args.objective.hyperparameters.get("band_scale", known["band_scale"].default)
    mean = sum(lengths) / len(lengths)
    fitting = short_response_band_scale(mean)
    line = f"responses have {mean:.1f} tokens on average; bands are scaled by --objective.band_scale {scale:g}"
    if scale >= fitting / 2:
        return f"{line} (sqrt(16384 / mean length) is {fitting:.3g}; more lets more responses take part in an update)"
    return f"{line}, and sqrt(16384 / mean length) would be {fitting:.3g}: raise it, or most responses are left out of an update"
