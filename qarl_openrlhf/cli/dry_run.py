"""What a run would do, without starting it: configuration, resources, which layer runs in which format, memory."""

import torch

from qarl_openrlhf.planning.architecture import check_config, meta_model
from qarl_openrlhf.planning.memory import ModelShape
from qarl_openrlhf.planning.placement import check_placement
from qarl_openrlhf.planning.positions import check_positions, load_config
from qarl_openrlhf.planning.report import memory_report
from qarl_openrlhf.quant.convert import ConversionReport, convert_model
from qarl_openrlhf.quant.scheme import QuantScheme


def describe(args, resources) -> tuple[str, list[str]]:
    """(text, problems). Text: resolved configuration (one flag a line), resource plan, updates a rollout, per-layer plan, memory
    a GPU. Problems: why the run would fail; ConfigError where prompt and response do not fit the model's positions."""
    config = load_config(args)
    check_positions(args, config)
    check_placement(args)
    model, plan = _planned(args, config)
    try:
        shape = ModelShape.of(model, plan, config)
    except AttributeError as error:
        memory, problems = f"not estimated: {type(model).__name__} is built otherwise than the decoders known here ({error})", []
    else:
        memory, problems = memory_report(args, shape)
    samples = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    lines = ["configuration:", *(f"  --{name} {value}" for name, value in flatten(args)), "", "resources:"]
    lines += [f"  {resources}", "", "one rollout:"]
    lines += [
        f"  {args.rollout.batch_size} prompts x {args.rollout.n_samples_per_prompt} responses = {samples} samples, "
        f"{samples * args.train.max_epochs / args.train.batch_size:g} optimizer steps of {args.train.batch_size}",
        "",
        "quantization plan:",
        plan.table(),
        "",
        "memory, estimated:",
        memory,
    ]
    return "\n".join(lines), problems


def flatten(args, prefix: str = "") -> list[tuple[str, object]]:
    """Nested namespace -> sorted (dotted name, value)."""
    rows = []
    for name, value in sorted(vars(args).items()):
        rows += flatten(value, f"{prefix}{name}.") if hasattr(value, "__dict__") else [(prefix + name, value)]
    return rows


def _planned(args, config) -> tuple[torch.nn.Module, ConversionReport]:
    """Convert the model's architecture on the meta device: names and shapes, no weights."""
    model = meta_model(config, args.actor.model_name_or_path)
    return model, convert_model(model, QuantScheme.parse(args.quant.scheme), cache=args.quant.cache)


def check_layers(args) -> None:
    """Every layer the scheme quantizes must fit it at the engine's tensor parallel size; ``QuantError`` names the first that does not.

    ConfigError for a config.json that makes no model, or whose heads do not divide.
    """
    scheme = QuantScheme.parse(args.quant.scheme)
    config = load_config(args)
    for layer in _planned(args, config)[1].layers:
        if layer.scheme is not None:
            scheme.check_layer(layer.name, layer.out_features, layer.in_features, tp=args.vllm.tensor_parallel_size)
    check_config(config, args.actor.model_name_or_path, args.vllm.tensor_parallel_size)
