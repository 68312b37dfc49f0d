"""What ``--algo.dynamic_filtering_enable`` has left of a run: groups to train on, or nothing, which is told and never saved as a model."""


class NothingTrainedError(RuntimeError):
    """A run whose filter let nothing through that makes an optimizer step: its model would be the one it started from."""


def tell_filtered(args, *, prompts: int, since: int, steps: int, filled: int, resumed: bool) -> str | None:
    """A note on a run that has come to its end, or None.

    Args:
        prompts: sampled from, over the run; since: of these, after the last one whose group passed the filter.
        steps: rollouts that were handed to the learner, filled: those of them with the responses of one optimizer step or more.
        resumed: from a checkpoint, whose policy is a result whatever follows.

    Raises:
        NothingTrainedError: where no rollout made an optimizer step.
    """
    if not args.algo.dynamic_filtering_enable:
        return None
    low, high = args.algo.dynamic_filtering_range
    outside = f"mean scores are not between {low:g} and {high:g} (--algo.dynamic_filtering_range)"
    if not resumed and not steps and prompts:
        raise NothingTrainedError(
            f"nothing was trained, and no model is written: the groups of all {prompts} prompts were filtered out, as their {outside}. Use "
            "prompts that the policy solves now and then, more samples a prompt, or look at the reward"
        )
    if not resumed and steps and not filled:
        raise NothingTrainedError(
            f"nothing was trained, and no model is written: of {prompts} prompts the filter left fewer responses in each rollout than an optimizer "
            f"step takes (--train.batch_size {args.train.batch_size}); use a smaller one, or more prompts"
        )
    if since:
        return f"after the last step the groups of all {since} prompts were filtered out, as their {outside}"
    return None
