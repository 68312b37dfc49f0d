"""Flags that do nothing beside another: a run would go on without what they ask for, or end at its first update."""

from qarl_openrlhf.config import ConfigError


def check_idle_flags(args, typed: set[str]) -> None:
    """ConfigError naming flag and remedy. typed: the names of the flags that the user typed."""
    _check_evaluation(args)
    _check_kl(args, typed)
    if args.critic.freezing_steps >= 0 and args.algo.advantage.estimator != "gae":
        raise ConfigError(
            f"--critic.freezing_steps {args.critic.freezing_steps} holds the policy back for its critic, and --algo.advantage.estimator "
            f"{args.algo.advantage.estimator} has none: nothing would be trained in those steps; leave it out, or use gae"
        )
    buffer, longest = args.reward.overlong_buffer_len, args.rollout.max_new_tokens or args.data.max_len
    if buffer is not None and buffer > longest:
        name = "rollout.max_new_tokens" if args.rollout.max_new_tokens else "data.max_len"
        raise ConfigError(
            f"--reward.overlong_buffer_len {buffer:g} is more tokens than a response may have (--{name} {longest}), of which it penalises the last: "
            "use fewer"
        )


def _check_evaluation(args) -> None:
    """OpenRLHF takes either flag without the other, and then evaluates nothing."""
    wanted = args.eval.steps not in (-1, float("inf"))
    if wanted and not args.eval.dataset:
        raise ConfigError(f"--eval.steps {args.eval.steps} evaluates nothing without held-out prompts: add --eval.dataset FILE")
    if args.eval.dataset and not wanted:
        raise ConfigError(f"--eval.dataset {args.eval.dataset} is never evaluated: add --eval.steps N")


def _check_kl(args, typed: set[str]) -> None:
    """An objective of ours comes with a coefficient of 0, and 0 is what a controller makes of 0."""
    kl = args.algo.kl
    if kl.init_coef > 0:
        return
    if kl.target:
        asked = f"--algo.kl.target {kl.target:g}"
    elif kl.use_loss and "algo.kl.init_coef" not in typed:
        asked = "--algo.kl.use_loss"
    else:
        return
    raise ConfigError(f"{asked} without a KL term, as --algo.kl.init_coef is 0: add e.g. --algo.kl.init_coef 0.01, or leave it out")
