"""From parsed flags to a checked configuration: what is derived, and which combinations are refused before anything starts."""

import importlib.util
import os
from types import SimpleNamespace

import torch

from qarl_openrlhf.engine import engine_args
from qarl_openrlhf.objectives import build_objective, find_spec, objective_hyperparameters
from qarl_openrlhf.quant.scheme import QuantScheme


REQUIRED = {
    "actor.model_name_or_path": "a Hugging Face name or a local directory",
    "data.prompt_dataset": "a Hugging Face data set or a local .jsonl file",
    "vllm.num_engines": "at least 1, since rollouts are made by vLLM",
}
OF_GROUPS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")  # advantages: a response against the others to its prompt


class ConfigError(ValueError):
    """Flags that cannot work together. The message names them and says what would work."""


def require(flat) -> None:
    """ConfigError where the parsed flags lack what every run needs, QuantError for an unknown scheme."""
    QuantScheme.parse(getattr(flat, "quant.scheme"))
    for flag, meaning in REQUIRED.items():
        if not str(getattr(flat, flag) or "").strip():
            raise ConfigError(f"--{flag} is missing: {meaning}")
    if not any(getattr(flat, flag) for flag in ("reward.remote_url", "reward.model_name_or_path", "train.agent_func_path")):
        raise ConfigError(
            "no reward: give --reward.remote_url (a Python file with reward_func, or a URL), --reward.model_name_or_path, "
            "or --train.agent_func_path"
        )
    if flat.use_ms and importlib.util.find_spec("modelscope") is None:
        raise ConfigError("--use_ms needs the package modelscope, which is not installed: install it, or drop the flag")


def prepare(flat, device: str, typed: set[str]) -> list[str]:
    """Adjust flat parsed flags to the machine before OpenRLHF checks them. Returns notes on what was changed.

    Without a GPU, what no CPU run could have had otherwise is noted with ``--verbose`` and in dry runs only.

    Args:
        flat: argparse namespace with dotted names; typed: the names the user typed (never changed silently).
    """
    notes = []

    all_notes = device != "cpu" or flat.verbose or flat.dry_run or flat.dry_run_all

    def set_default(name: str, value, why: str, *, always_noted: bool = True) -> None:
        if name not in typed and getattr(flat, name) != value:
            setattr(flat, name, value)
            if always_noted or all_notes:
                notes.append(f"--{name} {value}: {why}")

    if not _has_flash_attn():
        varlen = getattr(flat, "ds.packing_samples") or getattr(flat, "train.dynamic_batch_enable")
        kind = "qarl_varlen" if varlen else "sdpa"
        set_default("ds.attn_implementation", kind, "flash-attn is not installed; PyTorch's own", always_noted=False)
    if device == "cpu":
        for role in ("actor", "ref", "critic", "reward"):
            set_default(f"{role}.num_gpus_per_node", 1, "on a CPU, one process", always_noted=False)
        set_default("vllm.enforce_eager", True, "CUDA graphs need CUDA", always_noted=False)
        if getattr(flat, "vllm.enable_sleep"):
            setattr(flat, "vllm.enable_sleep", False)
            notes.append("--vllm.enable_sleep off: vLLM has no sleep mode on a CPU, where it would free no GPU memory")
    if getattr(flat, "objective.name"):
        set_default("algo.kl.init_coef", 0.0, "an objective of ours has no KL term unless you ask for one")
    if QuantScheme.parse(getattr(flat, "quant.scheme")).activation_format != "bf16":
        # Sound runs of SmolLM2 on an H200 showed 0.13 to 0.47 (docs/results/learning).
        why = "where activations have 8 bits, the order of a sum alone moves a text's log-probs by tenths of a nat"
        set_default("sync.probe_tol", 1.0, why, always_noted=False)
    if getattr(flat, "metrics.dir") is None:
        setattr(flat, "metrics.dir", getattr(flat, "ckpt.output_dir"))
    else:  # OpenRLHF's ./ckpt would be the model of whichever run ended last
        for name, folder in (("ckpt.output_dir", "model"), ("ckpt.path", "checkpoints")):
            if name not in typed:
                setattr(flat, name, os.path.join(getattr(flat, "metrics.dir"), folder))
    _check_groups(flat)
    _check_rollout_batches(flat)
    return notes


def trained_roles(args) -> list[str]:
    """The models that a run trains, by the group of flags that each has: "actor", and "critic" where there is one."""
    return ["actor", "critic"] if args.critic.model_name_or_path else ["actor"]


def _check_groups(flat) -> None:
    """What compares a prompt's responses needs several (assertions of OpenRLHF's, after which no advice on batches is right)."""
    if getattr(flat, "rollout.n_samples_per_prompt") > 1:
        return
    estimator = getattr(flat, "algo.advantage.estimator")
    if estimator in OF_GROUPS:
        why = f"--algo.advantage.estimator {estimator} compares the responses to a prompt with each other"
    elif getattr(flat, "algo.dynamic_filtering_enable"):
        why = "--algo.dynamic_filtering_enable judges prompts by the mean of several responses"
    else:
        return
    raise ConfigError(f"--rollout.n_samples_per_prompt 1: {why}: use 2 or more, e.g. 8")


def _check_rollout_batches(flat) -> None:
    """Every process of a trained model must get a micro-batch of each rollout (an assertion of OpenRLHF's, which names no flag), and
    all of a model's as many optimizer steps' worth."""
    critic = getattr(flat, "algo.advantage.estimator") == "gae"  # OpenRLHF sets its path later
    for role in ("actor", "critic") if critic else ("actor",):
        _check_rollout_of(flat, role)
    policy, values = (_processes(flat, role) for role in ("actor", "critic"))
    if critic and getattr(flat, "train.dynamic_batch_enable") and policy % values:
        raise ConfigError(
            f"--train.dynamic_batch_enable deals a rollout out in {policy} parts, one a policy process, and those do not divide into {values} critic "
            f"processes (--critic.num_nodes x --critic.num_gpus_per_node): use {' or '.join(str(n) for n in range(1, policy + 1) if policy % n == 0)}"
        )


def _processes(flat, role: str) -> int:
    """Processes of a trained model, each of which gets samples of its own."""
    return getattr(flat, f"{role}.num_nodes") * getattr(flat, f"{role}.num_gpus_per_node")


def _check_rollout_of(flat, role: str) -> None:
    responses = getattr(flat, "rollout.batch_size") * getattr(flat, "rollout.n_samples_per_prompt")
    count, micro = _processes(flat, role), getattr(flat, "rollout.micro_batch_size")
    how = f"--rollout.batch_size {getattr(flat, 'rollout.batch_size')} x --rollout.n_samples_per_prompt {getattr(flat, 'rollout.n_samples_per_prompt')}"
    group = f"--{role}.num_nodes x --{role}.num_gpus_per_node"
    if responses // micro < count:
        if responses < count:
            raise ConfigError(f"{how} are fewer responses than there are processes ({group}: {count}): sample more")
        raise ConfigError(
            f"{how} = {responses} responses in micro-batches of --rollout.micro_batch_size {micro} leave some of the {count} processes "
            f"({group}) without one: use --rollout.micro_batch_size {responses // count} or less"
        )
    if getattr(flat, "train.dynamic_batch_enable"):  # dynamic batches are dealt out response by response
        return
    shares = _shares(responses, micro, count)
    updates = [share // (getattr(flat, "train.batch_size") // count) for share in shares] if count <= getattr(flat, "train.batch_size") else []
    if len(set(updates)) > 1:
        fitting = [n for n in range(1, micro + 1) if len(set(_shares(responses, n, count))) == 1]
        works = f"use --rollout.micro_batch_size {fitting[-1]}" if fitting else f"sample a multiple of {count} responses"
        raise ConfigError(
            f"{how} = {responses} responses in micro-batches of --rollout.micro_batch_size {micro} give the {count} processes ({group}) "
            f"{' and '.join(map(str, dict.fromkeys(shares)))} responses, which fill {' and '.join(map(str, dict.fromkeys(updates)))} optimizer steps; "
            f"as all must make the same number, the rest would be dropped: {works}"
        )


def _shares(responses: int, micro: int, learners: int) -> list[int]:
    """Responses that each learner process gets: OpenRLHF deals out micro-batches, as many to each but for the last."""
    pieces = [min(micro, responses - first) for first in range(0, responses, micro)]
    each = -(-len(pieces) // learners)
    return [sum(pieces[rank * each : (rank + 1) * each]) for rank in range(learners)]


def check_card(scheme: QuantScheme, capability: tuple[int, int], card: str) -> None:
    """ConfigError for a scheme that a card (CUDA compute capability, name) has no instructions or no vLLM kernel for."""
    version = f"{card} has compute capability {capability[0]}.{capability[1]}"
    if scheme.name == "w4a8" and capability[0] != 9:
        raise ConfigError(f"--quant.scheme {scheme} runs on Hopper cards only (vLLM's W4A8 kernel), and {version}: use fp8 or w4a16")
    if scheme.name == "fp8" and capability < (8, 9):
        raise ConfigError(f"--quant.scheme {scheme} needs FP8 tensor cores (Ada, Hopper or newer), and {version}: use w8a8 or w4a16")


def _has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def check(args: SimpleNamespace, device: str, typed: set[str]) -> None:
    """Refuse wrong combinations and fill in ``args.objective.hyperparameters``, ``args.quant.cache``, ``args.sync.transport``.

    Args:
        args: OpenRLHF's nested arguments with our groups in them.
    """
    from qarl_openrlhf.planning.idle_flags import check_idle_flags
    from qarl_openrlhf.planning.liger import check_liger
    from qarl_openrlhf.planning.low_bit import check_low_bit

    scheme = QuantScheme.parse(args.quant.scheme)
    args.quant.scheme = str(scheme)
    args.device = device
    if device == "cpu" and args.quant.kernel == "triton":
        raise ConfigError("--quant.kernel triton runs on GPUs only: on a CPU use auto or torch")
    _check_objective(args, typed)
    _check_learner(args)
    _check_asynchronous(args, typed)
    if scheme.quantized:
        _check_quantized(args, scheme, device)
    if args.rollout.top_p < 1 and not args.rollout.allow_truncated_sampling:
        raise ConfigError(
            f"--rollout.top_p {args.rollout.top_p} samples from a truncated distribution that the learner does not compute; "
            "use 1.0, or accept the mismatch with --rollout.allow_truncated_sampling"
        )
    if args.ds.packing_samples and not _has_flash_attn():
        args.ds.attn_implementation = "qarl_varlen"  # actors.varlen_attention
    args.sync.transport = choose_transport(args, device)
    _check_schedulers(args)
    check_idle_flags(args, typed)
    _check_dynamic_batches(args)
    _check_muon(args, typed)
    check_low_bit(args)
    check_liger(args, device)
    if (given := engine_args.engine_args(args)) and (wrong := engine_args.problem(given)):
        raise ConfigError(wrong)
    if args.quant.cache == "auto":
        args.quant.cache = default_cache(args.ds.zero_stage, device, scheme)


def choose_transport(args, device: str) -> str:
    """gloo on a CPU; ipc where learner and engines share GPUs; nccl where engines have GPUs of their own."""
    shared = args.train.colocate_all and not args.train.async_enable
    fitting = "gloo" if device == "cpu" else "ipc" if shared else "nccl"
    if fitting == "ipc" and args.actor.num_nodes > 1:
        raise ConfigError(
            f"--train.colocate_all with --actor.num_nodes {args.actor.num_nodes}: engines of another node cannot read the memory of learner "
            "rank 0's GPU; give learner and engines GPUs of their own (without --train.colocate_all; recipes: QARL_PLACE=apart)"
        )
    if args.sync.transport not in ("auto", fitting):
        where = "on a CPU" if device == "cpu" else "with --train.colocate_all" if shared else "with engines on GPUs of their own"
        raise ConfigError(f"--sync.transport {args.sync.transport} does not work {where}: use {fitting}, or auto")
    if args.sync.verify == "readback" and device == "cuda":
        raise ConfigError(
            "--sync.verify readback compares bytes in the engine's memory, which GPU kernels keep in another layout: use checksum"
        )
    return fitting


def default_cache(zero_stage: int, device: str, scheme: QuantScheme) -> str:
    """"dequant" where every rank holds all parameters anyway (the copy is small beside them); "packed" under ZeRO-3, and where no
    training forward multiplies quantized weights (``:rollout``)."""
    return "packed" if not scheme.aligned or (zero_stage == 3 and device == "cuda") else "dequant"


# Flags of the loss that an objective is in the place of.
OPENRLHFS_LOSS = ("actor.policy_loss_type", "actor.eps_clip", "actor.eps_clip_low_high", "actor.dual_clip", "actor.loss_agg_mode")


def replaces_openrlhfs(flag: str) -> bool:
    """Whether an objective is in the place of what a flag (without its dashes) sets."""
    return flag in OPENRLHFS_LOSS or flag.startswith("algo.advantage.is_correction_")


def _check_objective(args, typed: set[str]) -> None:
    given = {name: value for name, value in vars(args.objective).items() if name != "name" and value is not None}
    if not args.objective.name:
        if given:
            raise ConfigError(f"--objective.{next(iter(given))} without --objective.name has no effect: name an objective")
        args.objective.hyperparameters = {}
        return
    known = objective_hyperparameters(args.objective.name)
    rivals = [f for f in sorted(typed) if replaces_openrlhfs(f)]
    if rivals:
        raise ConfigError(
            f"--objective.name {args.objective.name} replaces OpenRLHF's loss, clipping and correction: drop --{', --'.join(rivals)} "
            f"(it has --objective.{', --objective.'.join(known)})"
        )
    foreign = sorted(set(given) - set(known))
    if foreign:
        raise ConfigError(
            f"--objective.name {args.objective.name} has no hyperparameter {', '.join(foreign)}; it has {', '.join(known)}"
        )
    build_objective(args.objective.name, **given)  # refuses values out of range, here and not in a Ray worker
    args.objective.hyperparameters = given
    if find_spec(args.objective.name).on_policy:
        updates = args.rollout.batch_size * args.rollout.n_samples_per_prompt * args.train.max_epochs / args.train.batch_size
        if updates != 1:
            raise ConfigError(
                f"--objective.name {args.objective.name} makes one optimizer step a rollout, these flags make {updates:g}: set --train.batch_size "
                f"{args.rollout.batch_size * args.rollout.n_samples_per_prompt} and --train.max_epochs 1"
            )


def _check_asynchronous(args, typed: set[str]) -> None:
    """Training goes on while an evaluation samples: when its result is there, the weights it judged are no more."""
    if not args.train.async_enable or not args.eval.dataset:
        return
    if "ckpt.best_metric_key" in typed and args.ckpt.best_metric_key != "none":
        raise ConfigError(
            f"--ckpt.best_metric_key {args.ckpt.best_metric_key} with --train.async_enable: when an evaluation has ended, the weights it "
            "judged have been trained further; use --ckpt.best_metric_key none, and --ckpt.save_steps"
        )
    args.ckpt.best_metric_key = "none"


def _check_dynamic_batches(args) -> None:
    """DeepSpeed's accumulation over a number of micro-batches that it is not told (``actors.strategy``) has limits."""
    if not args.train.dynamic_batch_enable:
        return
    if args.ds.overlap_comm and args.ds.zero_stage < 2:
        raise ConfigError(
            f"--train.dynamic_batch_enable and --ds.overlap_comm with --ds.zero_stage {args.ds.zero_stage}: DeepSpeed cannot accumulate "
            "there; drop --ds.overlap_comm, or use --ds.zero_stage 2 or 3"
        )
    if args.ds.deepcompile:
        raise ConfigError("--train.dynamic_batch_enable with --ds.deepcompile: DeepSpeed cannot accumulate there; drop one of them")


def _check_schedulers(args) -> None:
    from transformers import SchedulerType

    known = [kind.value for kind in SchedulerType]
    for role in trained_roles(args):
        name = getattr(args, role).lr_scheduler
        if name not in known:
            raise ConfigError(f"--{role}.lr_scheduler {name} does not exist: there are {', '.join(known)}")


def _check_muon(args, typed: set[str]) -> None:
    for role in (role for role in trained_roles(args) if getattr(args, role).optim == "muon"):
        muon = getattr(args, role).muon
        if f"{role}.muon.lr" not in typed:
            raise ConfigError(
                f"--{role}.optim muon without --{role}.muon.lr: OpenRLHF's default of 0.02 is for pretraining. With "
                f"--{role}.muon.scale match_rms (the default) a learning rate of AdamW's size fits, e.g. 1e-6; with spectral, "
                "about 0.2 sqrt(hidden size) times that"
            )
        if args.ds.zero_stage == 0 or (args.ds.zero_stage == 1 and args.ds.grad_accum_dtype == "fp32"):
            what = "zero_stage 0" if args.ds.zero_stage == 0 else "grad_accum_dtype fp32 at stage 1"
            raise ConfigError(f"--{role}.optim muon does not run with --ds.{what}: use --ds.zero_stage 2 (or 1, 3)")
        if muon.ns_steps < 1 or not 0 <= muon.momentum < 1:
            raise ConfigError(
                f"--{role}.muon.ns_steps {muon.ns_steps} and --{role}.muon.momentum {muon.momentum}: at least 1 step, and a "
                "momentum from 0 to below 1"
            )


def _check_learner(args) -> None:
    """What the engines get is the learner's own parameters, whole, in BF16, under the checkpoint's names."""
    if args.ds.param_dtype != "bf16":
        raise ConfigError(
            f"--ds.param_dtype {args.ds.param_dtype} is not supported: the engines' weights are BF16 and take no others (and FP16 gradients "
            "underflow to NaN: QaRL, section 4); use bf16"
        )
    if args.ds.lora.rank > 0:
        raise ConfigError(
            f"--ds.lora.rank {args.ds.lora.rank} is not supported: the full weights are trained and published, and an engine's model has "
            "no place for an adapter's; leave it out"
        )
    if args.ds.load_in_4bit:
        raise ConfigError(
            "--ds.load_in_4bit would load the policy in NF4, too, which can be neither trained nor published: --ref.load_in_4bit is for the "
            "reference model alone"
        )
    if args.ds.tensor_parallel_size > 1:
        raise ConfigError(
            f"--ds.tensor_parallel_size {args.ds.tensor_parallel_size} is not supported: a learner's rank would publish a part of each weight; "
            "use --ds.zero_stage 3"
        )
    if args.ds.ring_attn_size > 1:
        raise ConfigError(
            f"--ds.ring_attn_size {args.ds.ring_attn_size} is not supported: the check after each publish gives a learner a whole text, where ring "
            "attention wants its part of one; use 1, and --train.max_tokens_per_gpu and --actor.logprob_chunk for long responses"
        )


def _check_quantized(args, scheme: QuantScheme, device: str) -> None:
    if scheme.aligned and scheme.activation_format != "bf16" and args.vllm.tensor_parallel_size > 1:
        raise ConfigError(
            f"--vllm.tensor_parallel_size {args.vllm.tensor_parallel_size} with --quant.scheme {scheme}: each engine rank would "
            "quantize its own share of a token's activations, the learner the whole token, so the two would not be aligned; use "
            "tensor parallel size 1 and more engines, or w4a16"
        )
    if device == "cuda" and torch.cuda.is_available():
        check_card(scheme, torch.cuda.get_device_capability(), torch.cuda.get_device_name())
    if device == "cpu" and scheme.name in ("fp8", "w4a8"):
        raise ConfigError(
            f"--quant.scheme {scheme} needs a GPU engine: vLLM has no {scheme.name} kernel for CPUs. On a CPU use w4a16 or w8a8"
        )
