"""New weights for vLLM's own GPU layers: checkpoint layout -> kernel layout, one layer at a time, in place.

vLLM's low-bit layers replace their checkpoint tensors by tensors in a kernel's layout after loading (Marlin, Machete,
CUTLASS), and CUDA graphs hold the addresses of those. A :class:`GpuLayer` rebuilds the checkpoint tensors of its layer on the
side, lets vLLM process them, and copies the result into the tensors the graphs know. Everything else that processing made
anew (workspaces, kernel and quantization objects) is put back as it was at start.

vLLM's own layerwise reload does the same from one call of a weight loader a tensor; a mixture of experts with 55 thousand
tensors never finishes there. Here a tensor is copied straight to its place, and stacked experts are one tensor.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

ALREADY = "_already_called_process_weights_after_loading"


def checkpoint_parameters(layer: nn.Module) -> dict[str, Tensor]:
    """The layer's own parameters as they were before vLLM processed them (on the meta device where it did)."""
    if isinstance(getattr(layer, "quant_method", None), BaseKVCacheMethod):
        return {}  # attention: scales of an FP8 KV cache, which no scheme has
    live = {name: p for name, p in layer._parameters.items() if p is not None}
    if not needs_processing(layer):
        return live
    before = dict(get_layerwise_info(layer).restore_metadata[0])
    if "bias" in live:  # vLLM creates it after it has recorded the others, and does not move it to meta
        before.setdefault("bias", live["bias"])
    return before


def needs_processing(layer: nn.Module) -> bool:
    """Whether the layer's tensors in memory differ in layout from those of a checkpoint."""
    method = getattr(layer, "quant_method", None)
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    repacks = isinstance(method, QuantizeMethodBase) and not isinstance(method, plain)
    return repacks and not getattr(method, "in_place", False)


class GpuLayer:
    """One vLLM layer during one update."""

    def __init__(self, path: str, layer: nn.Module, expected: int):
        self.path, self.layer = path, layer
        self.missing = expected  # checkpoint tensors that have not come yet
        self.processed = needs_processing(layer)
        self.parameters: dict[str, Tensor] = {}

    def parameter(self, name: str) -> Tensor:
        """Where a checkpoint tensor of this layer is to be copied: the live parameter, or one made on the side."""
        if not self.processed:
            return getattr(self.layer, name).data
        if not self.parameters:
            with torch.device(_device(self.layer)):
                for key, meta in checkpoint_parameters(self.layer).items():
                    self.parameters[key] = materialize_meta_tensor(meta)
        return self.parameters[name].data

    def arrived(self, count: int = 1) -> None:
        """Note that tensors have been copied; once all have, bring the layer into the kernel's layout."""
        self.missing -= count
        if self.missing == 0 and self.processed:
            self._process()
            self.parameters = {}

    @torch.no_grad()
    def _process(self) -> None:
        layer = self.layer
        live = dict(layer._parameters)
        buffers = dict(layer._buffers)
        kept = [(owner, dict(vars(owner))) for owner in _owners(layer)]
        attributes = {k: v for k, v in vars(layer).items() if k not in ("_parameters", "_buffers", "_modules")}
        try:
            layer._parameters.clear()
            layer._parameters.update(self.parameters)
            layer.__dict__.pop(ALREADY, None)
            layer.quant_method.process_weights_after_loading(layer)
            fresh = {**layer._parameters, **layer._buffers}
            copied: set[int] = set()  # some layers have one tensor under two names
            for name, old in {**live, **buffers}.items():
                if old is not None and fresh.get(name) is not old and old.data_ptr() not in copied:
                    self._copy(name, old, fresh.get(name))
                    copied.add(old.data_ptr())
            for owner, before in [*kept, (layer, attributes)]:
                for name, old in before.items():
                    new = vars(owner).get(name)
                    if isinstance(old, Tensor) and isinstance(new, Tensor) and new is not old:
                        self._copy(name, old, new)
        finally:
            layer._parameters.clear()
            layer._parameters.update(live)
            layer._buffers.clear()
            layer._buffers.update(buffers)
            for name in set(vars(layer)) - set(attributes) - {"_parameters", "_buffers", "_modules"}:
                del layer.__dict__[name]
            layer.__dict__.update(attributes)
            for owner, before in kept:
                vars(owner).clear()
                vars(owner).update(before)

    def _copy(self, name: str, old: Tensor, new: Tensor | None) -> None:
        if new is None or new.shape != old.shape or new.dtype != old.dtype:
            found = "none" if new is None else f"{new.dtype} {list(new.shape)}"
            raise RuntimeError(
                f"{self.path}.{name}: the kernel's tensor was {old.dtype} {list(old.shape)} at start and is {found} after the "
                "update; this layer cannot be updated in place"
            )
        old.data.copy_(new.data)


def _device(layer: nn.Module) -> torch.device:
    return next(p.device for p in layer.parameters() if p is not None)


def _owners(layer: nn.Module) -> list:
    """vLLM's objects beside the layer that hold what processing makes: quantization method, scheme, kernel."""
    found: list = []

    def visit(value, depth: int) -> None:
        ours = type(value).__module__.startswith("vllm.") and hasattr(value, "__dict__") and not isinstance(value, type)
        if not ours or isinstance(value, (nn.Module, Tensor)) or depth > 3 or any(value is seen for seen in found):
            return
        found.append(value)
        for child in list(vars(value).values()):
            visit(child, depth + 1)

    for name in ("quant_method", "scheme"):
        visit(getattr(layer, name, None), 0)
    return found


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, layer) of every linear layer that runs one of vLLM's low-bit kernels."""
    for path, layer in model.named_modules():
        if isinstance(layer, LinearBase) and needs_processing(layer):
            yield path, layer


@torch.no_grad()
def effective_weight(layer: LinearBase) -> Tensor:
    """[n, k] in the model's dtype: what the kernel multiplies by, read off an identity matrix sent through the layer.

    Exact for weight-only schemes; with 8-bit activations the unit vectors themselves are rounded.
    """
    width = layer.input_size_per_partition
    dtype = layer.params_dtype
    eye = torch.eye(width, dtype=dtype, device=_device(layer))
    rows = [layer.quant_method.apply(layer, part, None) for part in eye.split(1024)]
    return torch.cat(rows).t().contiguous()


def kernel_names(model: nn.Module) -> dict[str, str]:
    """Layer type (the last part of its path) -> classes of vLLM that multiply it, of every low-bit layer."""
    found: dict[str, set[str]] = {}
    for path, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if not needs_processing(layer) or isinstance(method, BaseKVCacheMethod):
            continue
        owners = [getattr(layer, "scheme", None), method]
        kernels = [getattr(owner, name, None) for owner in owners for name in ("kernel", "fp8_linear", "linear_kernel")]
        chosen = next((type(kernel).__name__ for kernel in kernels if kernel is not None), None)
        experts = getattr(method, "experts_cls", None)
        chosen = chosen or (experts.__name__ if experts is not None else type(method).__name__)
        found.setdefault(path.rpartition(".")[2], set()).add(chosen)
    return {kind: ", ".join(sorted(names)) for kind, names in found.items()}
