"""Which kernel each layer of a model runs, and whether there is one for the scheme, the tensor-parallel size and the card."""

import re

import torch

from qarl_openrlhf.doctor.finding import Finding, fail, ok
from qarl_openrlhf.doctor.machine import Machine
from qarl_openrlhf.kernels import grouped
from qarl_openrlhf.quant.convert import convert_model
from qarl_openrlhf.quant.errors import QuantError
from qarl_openrlhf.quant.scheme import QuantScheme

# scheme -> (learner, engine, lowest and highest compute capability) on a card; see docs/kernels.md
CARD = {
    "bf16": ("PyTorch", "PyTorch", (8, 0), None),
    "w4a16": ("dequantize + PyTorch", "Marlin or Machete", (8, 0), None),
    "w8a8": ("w8a8_gemm (int8)", "CUTLASS int8", (8, 0), None),
    "fp8": ("torch._scaled_mm (e4m3)", "CUTLASS fp8", (8, 9), None),
    "w4a8": ("torch._scaled_mm (e4m3)", "CUTLASS W4A8", (9, 0), (9, 0)),
}
# Of experts, the learner's product on a card; e4m3 codes have another one on cards that are not all Hopper.
EXPERTS = {
    "bf16": "torch._grouped_mm",
    "w4a16": "dequantize + torch._grouped_mm",
    "w8a8": "grouped_w8a8 (int8)",
    "fp8": "torch._scaled_grouped_mm (e4m3)",
    "w4a8": "torch._scaled_grouped_mm (e4m3)",
}
CPU = {
    "bf16": ("PyTorch", "PyTorch"),
    "w4a16": ("torch reference", "qarl, in place"),
    "w8a8": ("torch reference", "qarl, in place"),
}
_BY_CARD = "--quant.scheme w4a16 runs on every card from Ampere on"


def network_of(model: str) -> tuple[torch.nn.Module, object, int]:
    """(network on the meta device, config, parameters) of a hub name or a directory; OSError or ValueError if there is none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, trust_remote_code=True)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    parameters = sum(p.numel() for p in network.parameters())
    return network, config, parameters


def check_layers(network, config, scheme: QuantScheme, tp: int, device: str, machine: Machine) -> list[Finding]:
    """One finding a kind of layer; fails name the layer and the sizes that would work."""
    findings = _check_card(scheme, tp, device, machine) + _check_heads(config, tp)
    try:
        plan = convert_model(network, scheme, cache="none", tp=tp, device=device)
    except QuantError as error:
        fix = f"--quant.scheme or --vllm.tensor_parallel_size, as the message says (now {scheme}, TP {tp})"
        return [*findings, fail("kernels", str(error), fix)]
    if device == "cpu" and scheme.name not in CPU:
        return findings
    learner, engine = (CARD if device == "cuda" else CPU)[scheme.name][:2]
    kinds: dict[str, list] = {}
    for layer in plan.layers:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", layer.name), []).append(layer)
    for name, layers in kinds.items():
        first = layers[0]
        shape = f"{first.experts} x " if first.experts > 1 else ""
        shape += f"[{first.out_features}, {first.in_features}]"
        if first.scheme is None:
            kernels = f"PyTorch in both ({first.reason})" if first.reason != "bf16" else "PyTorch in both"
        else:
            experts = first.experts > 1 and device == "cuda"
            ours = "PyTorch (BF16)" if scheme.rollout_only else _experts(scheme, machine) if experts else learner
            theirs = "fused MoE of the same format" if experts else engine
            kernels = f"learner {ours}; engine {theirs}"
        findings.append(ok("kernels", f"{len(layers)} x {name} {shape}: {kernels}"))
    return findings


def _experts(scheme: QuantScheme, machine: Machine) -> str:
    hopper = all(gpu.capability == grouped.HOPPER for gpu in machine.gpus)
    return EXPERTS[scheme.name] if scheme.activation_format != "fp8" or hopper else "grouped_w8a8 (e4m3)"


def _check_card(scheme: QuantScheme, tp: int, device: str, machine: Machine) -> list[Finding]:
    if device == "cpu":
        if scheme.name not in CPU:
            return [fail("scheme", f"{scheme} has no engine on a CPU", "--quant.scheme w4a16 or w8a8; or a GPU")]
        return []
    findings = []
    low, high = CARD[scheme.name][2:]
    for index, gpu in enumerate(machine.gpus):
        if gpu.capability < low or (high and gpu.capability > high):
            span = f"{low[0]}.{low[1]}" + (" exactly (Hopper)" if high else " or later")
            found = ".".join(map(str, gpu.capability))
            findings.append(
                fail(
                    "scheme",
                    f"{scheme} needs compute capability {span}; GPU {index} ({gpu.name}) has {found}",
                    _BY_CARD,
                )
            )
    if machine.gpus and tp > len(machine.gpus):
        findings.append(
            fail(
                "gpus",
                f"TP {tp} needs {tp} GPUs of one host, {len(machine.gpus)} visible",
                f"--vllm.tensor_parallel_size {len(machine.gpus)} at most",
            )
        )
    if scheme.aligned and scheme.activation_format != "bf16" and tp > 1:
        findings.append(
            fail(
                "scheme",
                f"{scheme} at TP {tp}: engine ranks would quantize activations otherwise than the learner",
                "TP 1 and more engines, or w4a16",
            )
        )
    return findings


def _check_heads(config, tp: int) -> list[Finding]:
    text = config.get_text_config()
    heads, kv = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % tp or (kv % tp and tp % kv):
        works = [str(n) for n in (1, 2, 4, 8, 16) if heads % n == 0 and (kv % n == 0 or n % kv == 0)]
        return [
            fail(
                "heads",
                f"{heads} attention heads and {kv} key-value heads do not divide by TP {tp}",
                f"--vllm.tensor_parallel_size {' or '.join(works)}",
            )
        ]
    return []
