"""How vLLM is started for a scheme: the one place that chooses between our CPU method and vLLM's own GPU kernels."""

from transformers import AutoConfig
from vllm.config import WeightTransferConfig

from qarl_openrlhf.engine.cpu_method import METHOD
from qarl_openrlhf.quant import QuantError, QuantScheme

WORKER_EXTENSION = "qarl_openrlhf.engine.extension.QarlWorkerExtension"
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# Linear layers that no scheme quantizes, as compressed-tensors names them (the learner's convert_model has the same rule).
UNQUANTIZED = ["lm_head", r"re:.*\.(shared_expert_)?gate$"]


def engine_overrides(scheme: QuantScheme, *, model: str, device: str, tensor_parallel_size: int = 1) -> dict:
    """``AsyncEngineArgs`` keywords that make a vLLM engine for ``model`` (a BF16 checkpoint) run ``scheme``.

    The engine starts with dummy weights; the first publish gives it real ones. device is "cpu" or "cuda". QuantError where
    the scheme has no engine on that device.
    """
    common = {
        "load_format": "dummy",
        "weight_transfer_config": WeightTransferConfig(backend="qarl"),
        "worker_extension_cls": WORKER_EXTENSION,
        # log-probs of the distribution that was sampled from (after the temperature), as the learner computes them
        "logprobs_mode": "processed_logprobs",
    }
    if device == "cpu":
        return common | _cpu(scheme, model, tensor_parallel_size)
    return common | _cuda(scheme)


def _cpu(scheme: QuantScheme, model: str, tensor_parallel_size: int) -> dict:
    if scheme.name in ("fp8", "w4a8"):
        raise QuantError(
            f"scheme {scheme} has no CPU engine for {model}: its FP8 products exist only on GPUs. On a CPU use w4a16 or w8a8"
        )
    return {
        "quantization": METHOD,
        # A string, not our object: it travels in the model's config to EngineCore and to every worker process.
        "hf_overrides": {"quantization_config": {"quant_method": METHOD, "scheme": str(scheme)}},
        # vLLM refuses "ray" on a CPU. It turns "uni" into "mp" there, to bind OpenMP threads in a process of its own, which
        # we do not do: by its full name the one-process executor is left alone and saves a process (15 s of start-up).
        "distributed_executor_backend": "mp" if tensor_parallel_size > 1 else ONE_PROCESS,
        "enforce_eager": True,
        # read by mismatch/router_topk_agreement; vLLM refuses it for some of its GPU kernels
        "enable_return_routed_experts": _has_experts(model),
    }


def _has_experts(model: str) -> bool:
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=True).get_text_config()
    except OSError:  # no such model: vLLM is about to say so
        return False
    return getattr(config, "num_experts", 0) > 0


def _cuda(scheme: QuantScheme) -> dict:
    """vLLM's compressed-tensors kernels (Marlin, Machete, CUTLASS), chosen by vLLM from the injected config."""
    config = scheme.quantization_config(UNQUANTIZED)
    if config is None:
        return {}
    overrides: dict = {"hf_overrides": {"quantization_config": config}}
    if scheme.activation_format == "fp8":
        # Inductor's re-write of the quantization op and its fusion with the norm round otherwise than the op itself.
        overrides["compilation_config"] = {"custom_ops": ["+quant_fp8"], "pass_config": {"fuse_norm_quant": False}}
    return overrides
