"""A quantization scheme: one string, one frozen object, shared by learner, engine and export.

    NAME[:gN][:rollout]       e.g. w4a16, w4a16:g64, w8a8, w4a16:g64:rollout

``:rollout`` is the paper's "quantized rollout only" arm (arXiv 2604.07853): the engine gets the quantized weights while
the learner's forward stays in BF16.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from qarl_openrlhf.kernels import MAX_ROW
from qarl_openrlhf.quant.errors import QuantError

NAMES = ("bf16", "w4a16", "w8a8", "fp8", "w4a8")
GROUP_SIZES = {"w4a16": (32, 64, 128), "w4a8": (128,)}
_WEIGHT_FORMAT = {"bf16": None, "w4a16": "int4", "w8a8": "int8", "fp8": "fp8", "w4a8": "int4"}
_ACTIVATION_FORMAT = {"bf16": "bf16", "w4a16": "bf16", "w8a8": "int8", "fp8": "fp8", "w4a8": "fp8"}
_CHECKPOINT_FORMAT = {
    "w4a16": "pack-quantized",
    "w4a8": "pack-quantized",
    "w8a8": "int-quantized",
    "fp8": "float-quantized",
}
# vLLM splits these along their input features under tensor parallelism; all other linears along their output features,
# which moves no group (whether heads divide by TP is the engine's own check).
_ROW_PARALLEL = ("o_proj", "down_proj")
_TP_SIZES = (1, 2, 4, 8, 16)
MULTIPLE = 16  # like MAX_ROW of the learner's kernels on a card (quantize_pack, act_quant, w8a8_gemm); the references on a CPU take any


def _known() -> str:
    return f"schemes are {', '.join(NAMES)}, each NAME[:gN][:rollout], e.g. w4a16:g64:rollout"


@dataclass(frozen=True)
class QuantScheme:
    """Weight and activation formats of every quantized layer.

    ``group_size`` is the number of input features that share a scale (int4 only; None where a scale spans the row).
    ``rollout_only`` means that the learner's forward does not use the quantized weights.
    """

    name: str
    group_size: int | None = field(default=None)
    rollout_only: bool = False

    def __post_init__(self):
        if self.name not in NAMES:
            raise QuantError(f"quantization scheme {self.name!r} is unknown: {_known()}")
        sizes = GROUP_SIZES.get(self.name)
        if sizes is None and self.group_size is not None:
            raise QuantError(f"scheme {self.name} has no groups: write {self.name}, not {self.name}:g{self.group_size}")
        if sizes and self.group_size is None:
            object.__setattr__(self, "group_size", 128)
        if sizes and self.group_size not in sizes:
            works = " or ".join(f"{self.name}:g{s}" for s in sizes)
            raise QuantError(f"scheme {self.name} does not exist with group size {self.group_size}: use {works}")
        if self.name == "bf16" and self.rollout_only:
            raise QuantError("scheme bf16:rollout means nothing, bf16 quantizes nothing: use bf16")

    @classmethod
    def parse(cls, text: str) -> "QuantScheme":
        """Read a scheme string; QuantError (listing what exists) on anything else."""
        name, *options = text.strip().lower().split(":")
        if re.search(r"asym|zp|awq", text.lower()):
            raise QuantError(f"scheme {text!r}: asymmetric weight formats are not supported; {_known()}")
        if re.search(r"fp4|mxfp|nvfp", text.lower()):
            raise QuantError(f"scheme {text!r}: FP4 and microscaling formats are not supported; {_known()}")
        group_size, rollout_only = None, False
        for option in options:
            if option == "rollout" and not rollout_only:
                rollout_only = True
            elif re.fullmatch(r"g[0-9]+", option) and group_size is None:
                group_size = int(option[1:])
            else:
                raise QuantError(f"scheme {text!r}: option {option!r} is unknown or repeated; {_known()}")
        return cls(name, group_size, rollout_only)

    def __str__(self) -> str:
        group = f":g{self.group_size}" if self.group_size not in (None, 128) else ""
        return f"{self.name}{group}{':rollout' if self.rollout_only else ''}"

    @property
    def quantized(self) -> bool:
        """The engine runs quantized weights."""
        return self.name != "bf16"

    @property
    def aligned(self) -> bool:
        """The learner's forward runs the engine's quantized weights and arithmetic (QaRL)."""
        return self.quantized and not self.rollout_only

    @property
    def weight_format(self) -> str | None:
        """int4, int8, fp8, or None for bf16."""
        return _WEIGHT_FORMAT[self.name]

    @property
    def activation_format(self) -> str:
        """bf16, int8 or fp8."""
        return _ACTIVATION_FORMAT[self.name]

    def check_layer(self, layer_name: str, out_features: int, in_features: int, tp: int = 1, device: str | None = None) -> None:
        """QuantError if this layer cannot run quantized on ``tp`` tensor-parallel engine ranks.

        device: "cuda" or "cpu" of the run; by default a GPU where PyTorch sees one. The message names the layer and the group sizes
        and TP sizes that would work.
        """
        if not isinstance(tp, int) or tp < 1:
            raise QuantError(f"tensor parallel size {tp!r} does not exist: use 1 or more")
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        problem = self._layer_problem(layer_name, out_features, in_features, tp, device)
        if problem is None:
            return

        def fits(scheme: QuantScheme, size: int) -> bool:
            return scheme._layer_problem(layer_name, out_features, in_features, size, device) is None

        works = [f"{self.name}:g{g}" for g in GROUP_SIZES.get(self.name, ()) if fits(QuantScheme(self.name, g), tp)]
        sizes = [str(size) for size in _TP_SIZES if fits(self, size)]
        hints = []
        if works:
            hints.append(f"at TP {tp} use {' or '.join(works)}")
        if sizes and tp > 1:
            hints.append(f"with {self} use TP {' or '.join(sizes)}")
        hints = hints or [self._others(tp, fits)]
        shape = f"[{out_features}, {in_features}]"
        raise QuantError(f"layer {layer_name} {shape} cannot run {self} at TP {tp}: {problem}; {'; '.join(hints)}")

    @staticmethod
    def _others(tp: int, fits: Callable[["QuantScheme", int], bool]) -> str:
        """Which other schemes this layer can run, at this TP or else at some."""
        every = [QuantScheme(name, group) for name in NAMES if name != "bf16" for group in GROUP_SIZES.get(name, (None,))]
        found = {size: names for size in (tp, *_TP_SIZES) if (names := ", ".join(str(s) for s in every if fits(s, size)))}
        if not found:
            return "no quantized scheme fits this layer: use bf16"
        size, names = next(iter(found.items()))
        return f"at TP {size} use {names}, or bf16"

    def _layer_problem(self, layer_name: str, out_features: int, in_features: int, tp: int, device: str) -> str | None:
        if not self.quantized:
            return None
        if device == "cuda" and self.activation_format != "bf16":  # the learner's rows are whole, whatever the TP
            if in_features > MAX_ROW:
                return f"the kernels hold rows of at most {MAX_ROW} input features, not {in_features}"
            if self.aligned and in_features % MULTIPLE:
                return f"the 8-bit products need input features in multiples of {MULTIPLE}, not {in_features}"
        row_parallel = layer_name.rsplit(".", 1)[-1] in _ROW_PARALLEL
        if row_parallel and in_features % tp:
            return f"{in_features} input features do not divide by TP {tp}"
        k = in_features // tp if row_parallel else in_features
        if self.group_size and k % self.group_size:
            return f"{k} input features a rank do not divide by group size {self.group_size}"
        if ".experts." in layer_name:
            # gate and up are stacked, gate rows first, and each rank holds its share of both
            intermediate = in_features if row_parallel else out_features // 2
            if intermediate % tp:
                return f"the experts' intermediate size {intermediate} does not divide by TP {tp}"
            hidden = out_features if row_parallel else in_features
            if self.name == "w4a8" and (hidden % 256 or (intermediate // tp) % 256):
                return (
                    "the W4A8 kernel for experts needs hidden and (a rank's) intermediate sizes in multiples of 256, not "
                    f"{hidden} and {intermediate // tp}"
                )
        if self.name == "w4a8" and out_features % 128:
            return f"the W4A8 kernel needs output features in multiples of 128, not {out_features}"
        if self.name == "w4a8" and row_parallel and tp > 1:
            return "the W4A8 kernel rounds the scales of each rank's share of a row by that share's own maximum"
        return None

    def quantization_config(self, ignore: list[str]) -> dict | None:
        """The ``quantization_config`` of config.json that `vllm serve` reads; None for bf16.

        ignore: names (or ``re:`` patterns) of the nn.Linear layers that stay unquantized.
        """
        if not self.quantized:
            return None
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
        if self.weight_format == "int4":
            weights |= {"num_bits": 4, "strategy": "group", "group_size": self.group_size}
        elif self.weight_format == "fp8":
            weights |= {"type": "float"}
        activations = None
        if self.activation_format != "bf16":
            kind = {"int8": "int", "fp8": "float"}[self.activation_format]
            activations = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": activations,
            "output_activations": None,
            "format": _CHECKPOINT_FORMAT[self.name],
        }
        return {
            "quant_method": "compressed-tensors",
            "format": _CHECKPOINT_FORMAT[self.name],
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "ignore": list(ignore),
            "config_groups": {"group_0": group},
        }
