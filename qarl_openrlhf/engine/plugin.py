"""vLLM plugin (``vllm.general_plugins``): vLLM calls :func:`register` in every process it starts."""

import multiprocessing
import os
import threading


def register() -> None:
    """Make the quantization method and the weight-transfer backend "qarl" known to vLLM. May be called any number of times."""
    import torch
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers import quantization

    from qarl_openrlhf.engine.cpu_method import METHOD, QarlConfig
    from qarl_openrlhf.patches import vllm as patch

    patch.apply()
    # vLLM's AMX kernels (w4a16 with BF16 activations) do not ask the system for the tile registers: an illegal instruction, unless
    # oneDNN has asked before them. Nothing happens on a CPU without AMX.
    torch.cpu._init_amx()
    if METHOD not in quantization.QUANTIZATION_METHODS:
        quantization.register_quantization_config(METHOD)(QarlConfig)
    if "qarl" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("qarl", "qarl_openrlhf.sync.receiver", "QarlWeightTransfer")
    die_with_parent()


_watched = False


def die_with_parent() -> None:
    """End this process when the one that started it is gone: called in vLLM's child processes, nothing elsewhere.

    A killed actor (a node out of memory, ``ray.kill``) cannot take its EngineCore with it, and vLLM's EngineCore waits for
    requests for ever: an orphan that holds the model, the KV cache and, on GPUs, the device memory.
    """
    global _watched
    parent = multiprocessing.parent_process()
    if _watched or parent is None:
        return
    _watched = True

    def watch():
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="qarl-parent-watch", daemon=True).start()
