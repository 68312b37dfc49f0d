"""What a weight update writes to: the parameters of a running vLLM model, on a CPU or on GPUs."""

from collections import Counter

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config

from qarl_openrlhf.engine import cpu_method, gpu_layers, layout
from qarl_openrlhf.sync.errors import ManifestError


class CpuTarget:
    """The method "qarl": parameters lie in their checkpoint layout and are loaded through vLLM's own loaders."""

    can_read_back = True

    def __init__(self, model: nn.Module):
        self.model = model
        self.slots = layout.slots(model)

    def takes(self, slot: layout.Slot, dtype: torch.dtype) -> bool:
        """Whether a tensor of this dtype may be loaded there."""
        return dtype == slot.dtype

    def begin(self) -> None:
        pass

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.model.load_weights(list(tensors.items()))

    def finish(self) -> None:
        cpu_method.refresh(self.model)


class GpuTarget:
    """vLLM's own kernels: a layer is brought into its kernel's layout as soon as its last tensor has come."""

    can_read_back = False  # a repacked weight has no checkpoint bytes any more

    def __init__(self, model: nn.Module, config: VllmConfig):
        self.config = config
        self.modules = dict(model.named_modules())
        self.slots = layout.slots(model, gpu_layers.checkpoint_parameters)
        self.expected = Counter(slot.layer for slot in self.slots.values())
        self.layers: dict[str, gpu_layers.GpuLayer] = {}

    def takes(self, slot: layout.Slot, dtype: torch.dtype) -> bool:
        """Whether a tensor of this dtype may be loaded there.

        Some of vLLM's layers keep the scales' BF16 values in float32, and its experts ``weight_shape``, which no kernel reads, in
        the model's dtype.
        """
        widened = slot.attribute.endswith("weight_scale") and slot.dtype == torch.float32 and dtype == torch.bfloat16
        return dtype == slot.dtype or widened or (slot.attribute.endswith("weight_shape") and dtype == torch.int64)

    def begin(self) -> None:
        self.layers = {
            path: gpu_layers.GpuLayer(path, self.modules[path], count) for path, count in self.expected.items()
        }

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        with set_current_vllm_config(self.config):  # as when vLLM loads: W4A8's experts make an operation that asks for it
            for name, tensor in tensors.items():
                slot = self.slots[name]
                layer = self.layers[slot.layer]
                slot.place(layer.parameter(slot.attribute)).copy_(slot.part.of(tensor), non_blocking=True)
                layer.arrived()

    def finish(self) -> None:
        unfinished = [path for path, layer in self.layers.items() if layer.missing]
        self.layers = {}
        if unfinished:
            raise ManifestError(f"layer {unfinished[0]} has not got all of its tensors")


def target_for(model: nn.Module, config: VllmConfig) -> CpuTarget | GpuTarget:
    """The target of a loaded model; config: the one it was loaded with."""
    if cpu_method.is_in_place(model):
        return CpuTarget(model)
    if next(model.parameters()).is_cuda:
        return GpuTarget(model, config)
    raise NotImplementedError("this CPU engine's layers repack their weights; only the method 'qarl' updates in place")
