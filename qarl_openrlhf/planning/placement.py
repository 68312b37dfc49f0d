"""GPUs and batches that add up: what OpenRLHF and DeepSpeed assert only once Ray runs."""

import math

from qarl_openrlhf.config import ConfigError, trained_roles


def check_placement(args) -> None:
    """ConfigError for groups of GPUs that cannot share, and for batches that do not divide."""

    def gpus(role: str) -> int:
        group = getattr(args, role)
        return group.num_nodes * group.num_gpus_per_node

    def shape(role: str) -> tuple[int, int]:
        return getattr(args, role).num_nodes, getattr(args, role).num_gpus_per_node

    learner, engines, tp = gpus("actor"), args.vllm.num_engines, args.vllm.tensor_parallel_size
    if args.train.colocate_all and not args.train.async_enable and learner != engines * tp:
        works = f"--vllm.num_engines {learner // tp}" if learner % tp == 0 else f"a TP that divides {learner}"
        raise ConfigError(
            f"--train.colocate_all shares {learner} learner GPUs, but {engines} engines of TP {tp} need {engines * tp}: use {works}"
        )
    shared = args.train.colocate_all or args.train.colocate_actor_ref
    if shared and args.algo.kl.init_coef > 0 and shape("actor") != shape("ref"):
        raise ConfigError(
            "the reference shares the learner's GPUs: set --ref.num_nodes and --ref.num_gpus_per_node to "
            f"{args.actor.num_nodes} and {args.actor.num_gpus_per_node}"
        )
    samples = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    if samples < args.train.batch_size:
        raise ConfigError(
            f"a rollout has {samples} samples (--rollout.batch_size x --rollout.n_samples_per_prompt), less than one optimizer step "
            f"of --train.batch_size {args.train.batch_size}: nothing would be trained; use --train.batch_size {samples} or less"
        )
    if args.train.colocate_all and not args.train.colocate_critic_reward and "critic" in trained_roles(args) and gpus("critic") > learner:
        raise ConfigError(
            f"--train.colocate_all shares {learner} learner GPUs, which the critic's {gpus('critic')} processes do not fit on: set "
            f"--critic.num_nodes and --critic.num_gpus_per_node to {args.actor.num_nodes} and {args.actor.num_gpus_per_node}"
        )
    copies = {role: gpus(role) for role in trained_roles(args)}
    unit = math.lcm(*copies.values())  # what works is to work for all of them
    for role, count in copies.items():
        _check_batch(args, f"{count} GPUs (--{role}.num_nodes x --{role}.num_gpus_per_node)", count, unit)


def _check_batch(args, group: str, copies: int, unit: int) -> None:
    """ConfigError if the batch of an optimizer step does not divide among the ``copies`` of a trained model; ``unit``: what would."""
    batch, micro = args.train.batch_size, args.train.micro_batch_size
    if batch < copies:
        raise ConfigError(f"--train.batch_size {batch} leaves some of {group} without a sample: use a multiple of {unit}")
    if not args.train.dynamic_batch_enable and batch % (copies * micro):
        works = batch // (unit * micro) * unit * micro or unit * micro
        raise ConfigError(
            f"--train.batch_size {batch} does not divide into micro-batches of {micro} (--train.micro_batch_size) on {group}, "
            f"which DeepSpeed refuses: use {works}"
        )
