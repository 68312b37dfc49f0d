"""What a run would do, without starting it: configuration, resources, which layer runs in which format, memory."""

import torch

from qarl_openrlhf.checkpoint.flags import flatten
from qarl_openrlhf.kernels.product import cpu_multiplies_bf16
from qarl_openrlhf.objectives import objective_hyperparameters
from qarl_openrlhf.planning import experts, places
from qarl_openrlhf.planning.architecture import check_config, check_heads, meta_model
from qarl_openrlhf.planning.host_memory import host_report
from qarl_openrlhf.planning.memory import estimate
from qarl_openrlhf.planning.model_shape import ModelShape
from qarl_openrlhf.planning.placement import check_placement
from qarl_openrlhf.planning.positions import check_positions, load_config
from qarl_openrlhf.planning.report import card_bytes, main_memory_notes, memory_report
from qarl_openrlhf.quant.convert import ConversionReport, convert_model
from qarl_openrlhf.quant.scheme import QuantScheme


def describe(args, resources, defaults: dict | None = None) -> tuple[str, list[str]]:
    """(text, problems) of a run, the answer at the end.

    Text: flags, one a line (of ``defaults``, {name: value}, only those that have another value), the objective's
    hyperparameters, per-layer plan, kernels, memory, resources, updates a rollout. Problems: why the run would fail;
    ConfigError where prompt and response do not fit the model's positions.
    """
    config = load_config(args)
    check_positions(args, config)
    check_placement(args)
    check_heads(args)
    model, plan = _planned(args, config)
    try:
        shape = ModelShape.of(model, plan, config)
    except AttributeError as error:
        memory = f"not estimated: {type(model).__name__} is built otherwise than the decoders known here ({error})"
        problems = []
    else:
        memory, problems = memory_report(args, shape, _critic_shape(args, shape))
    samples = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    title = "flags:" if defaults is None else "flags that differ from their defaults (--dry_run_all shows all):"
    sections = [
        (title, [f"--{name} {value}" for name, value in flatten(args) if _is_shown(name, value, defaults)]),
        ("objective:", _objective(args)),
        ("quantization plan:", [plan.table()]),
        ("memory, estimated:", [memory]),
        ("kernels:", _kernels(args)),
        ("resources:", [resources.describe(args.device)]),
        (
            "one rollout:",
            [
                f"{args.rollout.batch_size} prompts x {args.rollout.n_samples_per_prompt} responses = {samples} samples, "
                f"{samples * args.train.max_epochs / args.train.batch_size:g} optimizer steps of {args.train.batch_size}"
            ],
        ),
    ]
    lines = [line for title, rows in sections for line in ("", title, *(f"  {row}" for row in "\n".join(rows).splitlines()))]
    return "\n".join(lines[1:]), problems


def main_memory_problems(args) -> list[str]:
    """Why a run on a CPU would not fit this machine's memory; nothing for runs on GPUs, whose engines say so themselves."""
    if args.device != "cpu":
        return []
    shape = _shape(args)
    return host_report(args, shape, _critic_shape(args, shape))[1] if shape else []


def offload_notes(args) -> list[str]:
    """Whether this machine's memory holds what a run on its GPUs offloads; see ``main_memory_notes``."""
    if args.device == "cpu" or not (args.ds.adam_offload or args.ds.enable_sleep or args.vllm.enable_sleep):
        return []
    shape = _shape(args)
    return main_memory_notes(max(one.host for one in estimate(args, shape, _critic_shape(args, shape)))) if shape else []


def engine_places(args) -> list[str]:
    """Settle how many responses an engine samples at a time (``planning.places``); notes."""
    card = card_bytes(args)
    if args.device == "cpu" or not card:
        return []
    shape = _shape(args)
    return places.settle(args, shape, card) if shape else []


def default_flags(parser) -> dict:
    """{dotted name: default} of a parser that has our flags."""
    return {name: value for name, value in vars(parser.parse_args([])).items() if name not in MADE_UP}


# Made anew for each run, or shown elsewhere.
MADE_UP = ("logger.wandb.run_name",)
ELSEWHERE = ("dry_run", "dry_run_all", "objective.hyperparameters")


def _is_shown(name: str, value, defaults: dict | None) -> bool:
    if name in ELSEWHERE or name.startswith("objective.") and name != "objective.name":
        return False
    return defaults is None or (name in defaults and value != defaults[name])


def _objective(args) -> list[str]:
    """Name and effective hyperparameters; a default is marked as one."""
    name, given = args.objective.name, args.objective.hyperparameters
    if not name:
        return [f"OpenRLHF's own loss, --actor.policy_loss_type {args.actor.policy_loss_type}"]
    known = {key: flag.default for key, flag in objective_hyperparameters(name).items()}
    rows = [f"--objective.{key} {given.get(key, default)}" + ("" if key in given else "  (default)") for key, default in known.items()]
    return [name, *rows]


def _kernels(args) -> list[str]:
    scheme = QuantScheme.parse(args.quant.scheme)
    if args.device == "cpu":
        slow = "float32 products rounded to BF16 once (no AVX512-BF16, no AMX)"
        return [f"learner and engine: torch, {'BF16 products of the CPU' if cpu_multiplies_bf16() else slow}"]
    chosen = {
        "auto": "the fastest known for each shape, noted when the run has chosen",
        "triton": "ours, in Triton",
        "torch": "torch references",
    }
    engine = "vLLM's own for this scheme, noted when the engine has loaded" if scheme.quantized else "vLLM's BF16"
    return [f"learner: {chosen[args.quant.kernel] if scheme.aligned else 'BF16'}", f"engine: {engine}"]


def _planned(args, config) -> tuple[torch.nn.Module, ConversionReport]:
    """Convert the model's architecture on the meta device: names and shapes, no weights."""
    model = meta_model(config, args.actor.model_name_or_path)
    return model, convert_model(model, QuantScheme.parse(args.quant.scheme), cache=args.quant.cache, device=args.device)


def _shape(args) -> ModelShape | None:
    """None of another kind of model than the estimate knows."""
    config = load_config(args)
    return _known(*_planned(args, config), config)


def _critic_shape(args, policy: ModelShape) -> ModelShape | None:
    """Of the critic's model, which has a number a token in place of an lm_head, or the policy's where the estimate does not know its kind;
    None of a run without a critic."""
    name = args.critic.model_name_or_path
    if not name:
        return None
    config = load_config(args, "critic")
    model = meta_model(config, name, "critic")
    if hasattr(model, "lm_head"):
        del model.lm_head
    return _known(model, convert_model(model, QuantScheme.parse("bf16")), config) or policy


def _known(model, plan, config) -> ModelShape | None:
    try:
        return ModelShape.of(model, plan, config)
    except AttributeError:
        return None


def check_layers(args) -> None:
    """Every layer the scheme quantizes must fit it at the engine's tensor parallel size; ``QuantError`` names the first that doesn't.

    ConfigError for a config.json that makes no model, or whose heads do not divide.
    """
    scheme = QuantScheme.parse(args.quant.scheme)
    config = load_config(args)
    for layer in _planned(args, config)[1].quantized:
        scheme.check_layer(layer.name, layer.out_features, layer.in_features, tp=experts.ranks_of(args, layer), device=args.device)
    check_config(config, args.actor.model_name_or_path, args.vllm.tensor_parallel_size)
