"""A vLLM engine over a directory that is already on disk: for verifying exports and for evaluation, without Ray.

Two ways to run quantized weights on a CPU, chosen by `--engine`:
    vllm   vLLM's own kernels, as `vllm serve` would run the directory
    qarl   our quantization method (the rollout engine's): the learner's arithmetic, in float32 where the CPU has no BF16
"""

from __future__ import annotations

import os
from pathlib import Path

from qarl_openrlhf import runtime
from qarl_openrlhf.quant.errors import QuantError
from qarl_openrlhf.quant.model_config import read_config
from qarl_openrlhf.quant.scheme import GROUP_SIZES, NAMES, QuantScheme

ENGINES = ("auto", "vllm", "qarl")
MEMORY = {"cpu": 0.3, "cuda": 0.9}  # share of the device's memory; vLLM's own 0.92 of a CPU's is refused where anything else runs


def scheme_of(directory: str) -> QuantScheme:
    """The scheme a directory (or hub model) was exported in, from its quantization_config; bf16 without one. QuantError where it is none
    of ours, and without a config.json that can be read."""
    config = getattr(read_config(directory), "quantization_config", None)
    if not config:
        return QuantScheme.parse("bf16")
    config = config if isinstance(config, dict) else config.to_dict()
    groups = config.get("config_groups") or {}
    every = [QuantScheme(name, size) for name in NAMES if name != "bf16" for size in GROUP_SIZES.get(name, (None,))]
    for scheme in every if len(groups) == 1 else ():  # a second group has other layers in another format
        ours, theirs = scheme.quantization_config([])["config_groups"]["group_0"], groups.get("group_0") or {}
        if all(_same(theirs.get(part), ours[part]) for part in ("weights", "input_activations")):
            return scheme
    return _unknown(directory, config)


def _same(theirs: dict | None, ours: dict | None) -> bool:
    """Whether two quantizations of weights or of activations make the same codes; both None: not quantized."""
    keys = ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic")
    return bool(theirs) == bool(ours) and (not ours or all((theirs.get(k) or None) == (ours.get(k) or None) for k in keys))


def _unknown(directory: str, config: dict) -> QuantScheme:
    raise QuantError(f"{directory} is quantized in a way no scheme of ours has (quant_method {config.get('quant_method')!r})")


def has_avx512() -> bool:
    path = Path("/proc/cpuinfo")
    return path.is_file() and " avx512f " in path.read_text(encoding="utf-8").replace("\n", " ")


def choose_engine(requested: str, scheme: QuantScheme, device: str, *, avx512: bool | None = None) -> str:
    """"vllm" or "qarl". QuantError where the scheme has no kernel there, naming what would work."""
    if requested not in ENGINES:
        raise QuantError(f"--engine {requested}: there are {', '.join(ENGINES)}")
    if device == "cuda":
        if requested == "qarl":
            raise QuantError("--engine qarl is the CPU's; on a GPU leave --engine out, vLLM's own kernels are what rollouts run")
        return "vllm"
    if scheme.activation_format == "fp8":
        raise QuantError(f"scheme {scheme} needs a GPU: no CPU engine multiplies FP8 values")
    avx512 = has_avx512() if avx512 is None else avx512
    if scheme.name == "w4a16" and not avx512:
        if requested == "vllm":
            raise QuantError("vLLM's w4a16 kernel for CPUs needs AVX512, which this one lacks: use --engine qarl, or a GPU")
        return "qarl"
    return "vllm" if requested == "auto" else requested


def engine_settings(
    directory: str, *, engine: str = "auto", max_model_len: int, seed: int = 0, tp: int = 1, memory: float | None = None
) -> tuple[dict, str]:
    """(keywords of `vllm.LLM` beside the model, "vllm" or "qarl"); sets the process environment vLLM needs here.

    memory: vLLM's gpu_memory_utilization, the share of the device's memory (default: MEMORY).
    """
    device = runtime.resolve_device("auto")
    runtime.set_environment(device)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: an error is ours to see
    scheme = scheme_of(directory)
    chosen = choose_engine(engine, scheme, device)
    settings: dict = {
        "max_model_len": max_model_len,
        "seed": seed,
        "tensor_parallel_size": tp,
        "gpu_memory_utilization": memory or MEMORY[device],
        "logprobs_mode": "processed_logprobs",
    }
    if device == "cpu":
        from qarl_openrlhf.engine.config import ONE_PROCESS

        settings |= {"enforce_eager": True, "distributed_executor_backend": "mp" if tp > 1 else ONE_PROCESS}
    if chosen == "qarl":
        settings |= _our_method(scheme)
    elif scheme.activation_format == "fp8":  # see engine/config.py
        settings["compilation_config"] = {"custom_ops": ["+quant_fp8"], "pass_config": {"fuse_norm_quant": False}}
    return settings, chosen


def open_engine(directory: str, *, options: dict | None = None, **choice):
    """(`vllm.LLM` with the directory's weights, "vllm" or "qarl"). choice: see `engine_settings`; options: of `vllm.LLM`."""
    settings, chosen = engine_settings(directory, **choice)
    from qarl_openrlhf.engine import plugin

    plugin.register()
    from vllm import LLM

    return LLM(model=directory, **(settings | (options or {}))), chosen


def _our_method(scheme: QuantScheme) -> dict:
    from qarl_openrlhf.engine.cpu_method import METHOD

    return {"quantization": METHOD, "hf_overrides": {"quantization_config": {"quant_method": METHOD, "scheme": str(scheme)}}}
