"""What a run would do, without starting it: configuration, resources, which layer runs in which format."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.quant.convert import ConversionReport, convert_model
from qarl_openrlhf.quant.scheme import QuantScheme


def describe(args, resources) -> str:
    """Resolved configuration (one flag a line), resource plan, updates a rollout, per-layer quantization plan."""
    samples = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    lines = ["configuration:", *(f"  --{name} {value}" for name, value in flatten(args)), "", "resources:"]
    lines += [f"  {resources}", "", "one rollout:"]
    lines += [
        f"  {args.rollout.batch_size} prompts x {args.rollout.n_samples_per_prompt} responses = {samples} samples, "
        f"{samples * args.train.max_epochs / args.train.batch_size:g} optimizer steps of {args.train.batch_size}",
        "",
        "quantization plan:",
        layer_plan(args).table(),
    ]
    return "\n".join(lines)


def flatten(args, prefix: str = "") -> list[tuple[str, object]]:
    """Nested namespace -> sorted (dotted name, value)."""
    rows = []
    for name, value in sorted(vars(args).items()):
        rows += flatten(value, f"{prefix}{name}.") if hasattr(value, "__dict__") else [(prefix + name, value)]
    return rows


def layer_plan(args) -> ConversionReport:
    """Convert the model's architecture on the meta device: names and shapes, no weights."""
    try:
        model_config = AutoConfig.from_pretrained(args.actor.model_name_or_path, trust_remote_code=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--actor.model_name_or_path {args.actor.model_name_or_path}: {error}") from None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=True)
    return convert_model(model, QuantScheme.parse(args.quant.scheme), cache="none")


def check_layers(args) -> None:
    """Every layer the scheme quantizes must fit it at the engine's tensor parallel size; ``QuantError`` names the first that does not."""
    scheme = QuantScheme.parse(args.quant.scheme)
    for layer in layer_plan(args).layers:
        if layer.scheme is not None:
            scheme.check_layer(layer.name, layer.out_features, layer.in_features, tp=args.vllm.tensor_parallel_size)
