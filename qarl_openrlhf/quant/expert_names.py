"""Names of expert weights: stacked in memory and in a push, one tensor an expert in a checkpoint.

    pushed       <block>.experts.gate_up_proj.weight_packed   int32 [E, 2 I, H/8]   (gate rows first)
                 <block>.experts.gate_up_proj                 [E, 2 I, H]           (unquantized)
    checkpoint   <block>.experts.3.gate_proj.weight_packed    int32 [I, H/8]
                 <block>.experts.3.up_proj.weight_packed      int32 [I, H/8]

and likewise ``down_proj`` and the suffixes ``weight``, ``weight_scale``, ``weight_shape``. `vllm serve` and every published
quantized checkpoint use the second form, which for 30B-A3B means 55 thousand tensors; a push sends 400.
"""

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from qarl_openrlhf.quant.errors import QuantError

_STACKED = re.compile(r"(?P<experts>.*\.experts)\.(?P<projection>gate_up_proj|down_proj)(\.(?P<suffix>weight\w*))?$")
_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def to_checkpoint(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(pushed name, tensor) -> (checkpoint name, tensor): stacked expert tensors taken apart, others passed through.

    Tensors are views of the stacked ones. A ``weight_shape`` must come after another tensor of its layer, which tells the
    number of experts, as :meth:`PackedWeight.tensors` orders them.
    """
    experts: dict[str, int] = {}
    for name, tensor in named_tensors:
        match = _STACKED.match(name)
        if match is None:
            yield name, tensor
            continue
        prefix, projection, suffix = match["experts"], match["projection"], match["suffix"] or "weight"
        layer = f"{prefix}.{projection}"
        if suffix == "weight_shape":
            if layer not in experts:
                raise QuantError(f"{name} comes before the weights of {layer}, so its number of experts is not known")
            parts = len(_HALVES[projection])
            one = torch.stack([tensor[0] // parts, tensor[1]])
            pieces = [[one.clone() for _ in range(parts)] for _ in range(experts[layer])]
        else:
            experts[layer] = tensor.shape[0]
            pieces = [expert.chunk(len(_HALVES[projection])) for expert in tensor]
        for e, halves in enumerate(pieces):
            for half, piece in zip(_HALVES[projection], halves, strict=True):
                yield f"{prefix}.{e}.{half}.{suffix}", piece
