"""GPUs and batches that add up: what OpenRLHF and DeepSpeed assert only once Ray runs."""

from qarl_openrlhf.config import ConfigError


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
    if args.train.batch_size < learner:
        raise ConfigError(
            f"--train.batch_size {args.train.batch_size} leaves some of {learner} learner GPUs without a sample: use a multiple of {learner}"
        )
    micro = args.train.micro_batch_size
    at_once = learner * micro
    if not args.train.dynamic_batch_enable and args.train.batch_size % at_once:
        works = args.train.batch_size // at_once * at_once or at_once
        raise ConfigError(
            f"--train.batch_size {args.train.batch_size} does not divide into micro-batches of {micro} (--train.micro_batch_size) on "
            f"{learner} learner GPUs, which DeepSpeed refuses: use {works}"
        )
