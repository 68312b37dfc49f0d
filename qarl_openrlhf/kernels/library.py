"""Registers each kernel as an op of the ``qarl`` namespace, and counts its calls.

An op has a schema and a fake (shape-only) implementation, so that torch.compile, gradient checkpointing and FakeTensor see
an ordinary operator. ``calls["act_quant_int8"]`` is how often that kernel ran in this process.
"""

from collections import Counter
from collections.abc import Callable

import torch
import triton

calls: Counter = Counter()
_LIBRARY = torch.library.Library("qarl", "DEF")
INTERPRETED = bool(triton.knobs.runtime.interpret)  # TRITON_INTERPRET=1: kernels run on the CPU, in numpy


def op(schema: str, fake: Callable) -> Callable:
    """Decorator: make the function the CUDA implementation of ``qarl::<schema>``. The first argument must be a tensor."""
    name = schema.split("(", 1)[0]

    def register(function: Callable):
        def run(x, *args):
            calls[name] += 1
            if x.is_cuda and x.device.index != torch.cuda.current_device():
                with torch.cuda.device(x.device):  # Triton launches on the current device
                    return function(x, *args)
            return function(x, *args)

        _LIBRARY.define(schema)
        _LIBRARY.impl(name, run, "CUDA")
        if INTERPRETED:
            _LIBRARY.impl(name, run, "CPU")
        torch.library.register_fake(f"qarl::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.qarl, name).default

    return register
