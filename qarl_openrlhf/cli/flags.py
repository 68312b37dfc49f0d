"""The flags that qarl_openrlhf adds to OpenRLHF's parser, and which flags a user typed."""

import argparse
import re

from qarl_openrlhf.engine import engine_args
from qarl_openrlhf.objectives import PRESETS, ObjectiveError, list_objectives, objective_hyperparameters
from qarl_openrlhf.planning import low_bit


OURS = "qarl"  # how the titles of our groups begin
# Python's own parser takes -3e-6, -1. and -inf for flags, and says that a value is missing in place of which values are allowed.
NEGATIVE_NUMBER = re.compile(r"^-(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf|infinity|nan)$", re.IGNORECASE)


def add_flags(parser: argparse.ArgumentParser, own_objective: str | list[str] | None = None) -> None:
    """Add our flags to ``parser``, a group for each subject, in the order in which ``--help`` shows them.

    ``own_objective`` (path/to/file.py:function, or several) adds the hyperparameters of a user's objectives, too.
    """
    parser._negative_number_matcher = NEGATIVE_NUMBER
    _add_quantization(parser.add_argument_group(f"{OURS}: low-bit rollout with an aligned learner"))
    _add_objective(
        parser.add_argument_group(f"{OURS}: policy objective (docs/objectives.md)"),
        [own_objective] if isinstance(own_objective, str) else own_objective or [],
    )
    _add_run(parser.add_argument_group(f"{OURS}: the run"))
    _add_sync(parser.add_argument_group(f"{OURS}: weight sync (docs/sync.md)"))
    _add_model(parser.add_argument_group(f"{OURS}: model, sampling, optimizer"))


def _add_quantization(group) -> None:
    group.add_argument(
        "--quant.scheme",
        default="bf16",
        metavar="NAME[:gN][:rollout]",
        help="bf16, w4a16, w8a8, fp8 or w4a8; ':gN' sets the group size of 4-bit weights (32, 64, 128); ':rollout' quantizes "
        "the rollout only and leaves the learner in BF16 (the paper's baseline)",
    )
    group.add_argument(
        "--quant.cache",
        default="auto",
        choices=["auto", "packed", "dequant", "none"],
        help="what the learner keeps between two optimizer steps: the packed weights (about 0.53 byte a weight at 4 bits), "
        "also the copy its products read, or nothing. Packed bytes are the same in all three",
    )
    group.add_argument(
        "--quant.kernel",
        default="auto",
        choices=["auto", "triton", "torch"],
        help="kernels of the learner on a GPU: the fastest known for each shape (ours or the library's), ours wherever there "
        "is one, or the plain torch references",
    )


def _add_run(group) -> None:
    group.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto: cuda where torch sees a GPU")
    group.add_argument(
        "--metrics.dir", default=None, metavar="DIR", help="run directory: metrics.jsonl, plots and, unless --ckpt.output_dir and --ckpt.path name others, model/ and checkpoints/ (default: --ckpt.output_dir)"
    )
    group.add_argument(
        "--ckpt.load_tag",
        default=None,
        metavar="TAG",
        help="with --ckpt.load_enable, the checkpoint to go on from, e.g. global_step20 (default: the newest that is whole)",
    )
    group.add_argument(
        "--dry_run",
        action="store_true",
        help="print the flags that differ from their defaults, the quantization plan, memory and resources, and whether the run "
        "fits; start nothing",
    )
    group.add_argument("--dry_run_all", action="store_true", help="a --dry_run that prints every flag")
    group.add_argument(
        "--dry_run_gpu_gb",
        type=float,
        default=None,
        metavar="GIB",
        help="memory of the card that --dry_run plans for (default: the visible one); works on a machine without a GPU, too",
    )
    group.add_argument("--ray.log_to_driver", action="store_true", help="show the log of every Ray worker in this terminal, and the traceback of an error")
    group.add_argument(
        "--verbose", action="store_true", help="also show notes that say only what this machine is: no GPU, no flash-attn"
    )


def _add_sync(group) -> None:
    group.add_argument(
        "--sync.transport",
        default="auto",
        choices=["auto", "gloo", "nccl", "ipc"],
        help="how packed tensors reach the engines: gloo on a CPU, ipc on a shared GPU, nccl between GPUs",
    )
    group.add_argument("--sync.bucket_mb", type=float, default=256, help="size of one flat buffer of the push, MiB")
    group.add_argument("--sync.timeout_s", type=float, default=300, help="a push that takes longer fails, naming the engine")
    group.add_argument(
        "--sync.verify",
        default="checksum",
        choices=["checksum", "readback", "off"],
        help="check every received tensor; 'readback' also checks what the engine's own parameters hold afterwards",
    )
    group.add_argument("--sync.probe_every", type=int, default=1, help="compare log-probs of a fixed text every N pushes")
    group.add_argument(
        "--sync.probe_tol",
        type=float,
        default=0.3,
        help="largest mean |delta logp| of that text, in nats, that is still the same weights; 1.0 of schemes with 8-bit activations",
    )


def _add_model(group) -> None:
    group.add_argument(
        "--vllm.engine_args",
        type=engine_args.checked,
        default="{}",
        metavar="JSON",
        help="more of vLLM's engine arguments, e.g. '{\"max_num_seqs\": 512, \"kv_cache_memory_bytes\": 4294967296}' (the latter also "
        "keeps vLLM from measuring free memory at start, which other processes on the GPU disturb)",
    )
    group.add_argument(
        "--rollout.stop", nargs="+", default=None, metavar="TEXT", help="strings that end a response; part of the response"
    )
    group.add_argument(
        "--rollout.allow_truncated_sampling",
        action="store_true",
        help="let --rollout.top_p < 1 run although sampler and learner then have different distributions",
    )
    group.add_argument(
        "--reward.timeout_s",
        type=float,
        default=300,
        help="a reward function or server that takes longer ends the run with an error",
    )
    group.add_argument(
        "--model.max_positions",
        type=int,
        default=None,
        metavar="N",
        help="positions of the model in place of config.json's max_position_embeddings, in learner, engines and exports",
    )
    group.add_argument(
        "--model.rope_theta", type=float, default=None, metavar="BASE", help="base of the rotary positions, likewise"
    )
    group.add_argument(
        "--actor.logprob_chunk",
        type=int,
        default=0,
        metavar="TOKENS",
        help="compute the learner's log-probs from the logits of so many response tokens at a time (e.g. 2048), so that memory does "
        "not grow with a micro-batch's tokens times the vocabulary; costs lm_head's product once more in the backward. 0: all at once",
    )
    for role in ("actor", "critic"):
        group.add_argument(
            f"--{role}.muon.scale",
            default="match_rms",
            choices=["match_rms", "spectral"],
            help=f"with --{role}.optim muon, the learning rate of a matrix [m, n]: --{role}.muon.lr times 0.2 sqrt(max(m, n)), "
            "so that AdamW's learning rates fit (the default; the paper does not say), or times sqrt(max(1, m/n))",
        )
    low_bit.add_flags(group)


def _add_objective(group, own: list[str]) -> None:
    group.add_argument(
        "--objective.name",
        default=None,
        metavar="NAME",
        help=f"one of {', '.join(list_objectives())}, or path/to/file.py:function; default: OpenRLHF's own loss",
    )
    group.add_argument(
        "--preset", default=None, metavar="NAME", help=f"flags of a named recipe, before your own: {', '.join(PRESETS)}"
    )
    group.add_argument(
        "--preset_length",
        type=float,
        default=None,
        metavar="TOKENS",
        help="mean response length that a *_short preset makes its bands for (default: --rollout.max_new_tokens, the longest)",
    )
    users: dict[str, list] = {}
    for objective in [*list_objectives(), *own]:
        for name, hyperparameter in objective_hyperparameters(objective).items():
            users.setdefault(name, []).append((objective, hyperparameter))
    for name, entries in users.items():
        first = entries[0][1]
        if other := next((objective for objective, hyperparameter in entries if hyperparameter.type is not first.type), None):
            raise ObjectiveError(
                f"{other}: hyperparameter {name!r} is a {first.type.__name__} in {entries[0][0]}, and one flag cannot be both: make it "
                "that type, or give it another name"
            )
        defaults: dict[str, list] = {}
        for objective, hyperparameter in entries:
            defaults.setdefault(str(hyperparameter.default), []).append(objective)
        values = next(iter(defaults)) if len(defaults) == 1 else "; ".join(f"{v} ({', '.join(o)})" for v, o in defaults.items())
        text = f"{first.help}; default {values}".replace("%", "%%")
        kind = {"action": argparse.BooleanOptionalAction} if first.type is bool else {"type": first.type}
        group.add_argument(f"--objective.{name}", default=None, help=text, **kind)


def typed_flags(parser: argparse.ArgumentParser, argv: list[str]) -> set[str]:
    """Destinations ("vllm.num_engines") of the flags present in ``argv``, whatever their value."""
    saved = [(action, action.default) for action in parser._actions]
    try:
        for action, _ in saved:
            action.default = argparse.SUPPRESS
        return set(vars(parser.parse_args(argv)))
    finally:
        for action, default in saved:
            action.default = default
