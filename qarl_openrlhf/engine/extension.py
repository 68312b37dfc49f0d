"""Methods added to vLLM's worker (``worker_extension_cls``), called through ``collective_rpc`` on every rank."""

import pickle
import random

import numpy
import torch
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear

from qarl_openrlhf.engine import gpu_layers, gpu_moe, layout, plugin
from qarl_openrlhf.engine.cpu_method import QarlLinearMethod
from qarl_openrlhf.engine.moe_method import CpuMoEMethod
from qarl_openrlhf.patches.vllm_names import RoutedExperts

# vLLM imports this module before it loads the model, in every worker: the backend is known even where the package is on the
# path but not installed, i.e. has no entry point.
plugin.register()


class QarlWorkerExtension:
    """Mixed into the worker class; ``self`` is the worker."""

    def qarl_status(self) -> dict:
        """Receipt of the current weight update, see ``QarlWeightTransfer.status``."""
        return self.weight_transfer_engine.status()

    def qarl_seed(self, seed: int) -> None:
        """Seed everything that this rank may draw samples with."""
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def qarl_abort(self) -> None:
        """End the current weight update, whatever state it is in, so that a later one can start."""
        self.weight_transfer_engine.abort()
        self._weight_update_active = False

    def qarl_kernels(self) -> dict[str, str]:
        """Layer type -> vLLM's kernel, of layers in a kernel's layout (none on a CPU)."""
        return gpu_layers.kernel_names(self.model_runner.get_model())

    def qarl_memory(self) -> dict:
        """Bytes of this rank's GPU memory held by torch: {allocated, peak}; zeros on a CPU."""
        if not torch.cuda.is_available():
            return {"allocated": 0, "peak": 0}
        return {"allocated": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}

    def qarl_read_tensors(self, names: list[str] | None) -> bytes:
        """Pickled {checkpoint name: (full shape, Part, tensor of this rank's part)}.

        names None: all that lie in memory as a checkpoint has them (on a GPU not those in a kernel's layout).
        """
        model = self.model_runner.get_model()
        slots = layout.slots(model, gpu_layers.checkpoint_parameters)
        layers = dict(model.named_modules())
        plain = {name: slot for name, slot in slots.items() if not gpu_layers.needs_processing(layers[slot.layer])}
        if names is not None and (repacked := [name for name in names if name not in plain]):
            raise KeyError(f"{repacked[0]} is not in this engine's memory as a checkpoint has it; read its effective weight")
        chosen = plain if names is None else {name: plain[name] for name in names}
        return pickle.dumps({name: (slot.shape, slot.part, slot.read().cpu().clone()) for name, slot in chosen.items()})

    def qarl_effective_weights(self, names: list[str] | None) -> bytes:
        """Pickled {layer name: (full shape, Part, part [n, k] in the model's dtype)} of quantized layers, un-fused."""
        model = self.model_runner.get_model()
        packed_modules = getattr(model, "packed_modules_mapping", {})
        found = {}
        for path, module in model.named_modules():
            experts = {}
            if isinstance(getattr(module, "quant_method", None), CpuMoEMethod):
                experts = module.quant_method.effective_weights(module, path)
            elif isinstance(module, RoutedExperts) and gpu_layers.needs_processing(module):
                experts = gpu_moe.effective_weights(path, module)
            found |= {name: weight for name, weight in experts.items() if names is None or name in names}
            if not isinstance(module, LinearBase):
                continue
            if isinstance(module.quant_method, QarlLinearMethod):
                weight = module.quant_method.effective_weight(module)
            elif gpu_layers.needs_processing(module):
                weight = gpu_layers.effective_weight(module)
            else:
                continue
            for p in layout.projections(path, module, packed_modules):
                if names is not None and p.name not in names:
                    continue
                part, shape = layout.Part(0, p.offset, p.rows), (p.total, module.input_size)
                if isinstance(module, RowParallelLinear):
                    part = layout.Part(1, module.tp_rank * weight.shape[1], weight.shape[1])
                found[p.name] = (shape, part, weight[p.start : p.start + p.rows].cpu().clone())
        return pickle.dumps(found)
