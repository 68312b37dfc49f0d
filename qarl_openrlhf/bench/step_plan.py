"""What bench_step will measure, and why it can't: schemes a card has no kernel for, depths and caches that do not fit."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from qarl_openrlhf.bench import sync
from qarl_openrlhf.bench.roofline import Bounds, card_of, newton_schulz_operations
from qarl_openrlhf.bench.step_workload import Workload
from qarl_openrlhf.config import ConfigError, check_card
from qarl_openrlhf.optim.groups import matrix_shapes
from qarl_openrlhf.planning.architecture import meta_model
from qarl_openrlhf.planning.memory import ENGINE_WORK, estimate
from qarl_openrlhf.planning.model_shape import ModelShape, kv_bytes_per_token, packed_bytes
from qarl_openrlhf.planning.parts import CONTEXT, gib
from qarl_openrlhf.quant.convert import convert_model
from qarl_openrlhf.quant.scheme import QuantScheme

SCHEMES = ("bf16", "w4a16", "w4a16:rollout", "fp8", "w8a8", "w4a8")
USABLE = 0.95


def runnable(schemes: list[str] | None, device: str) -> tuple[list[str], list[str]]:
    """(schemes in canonical form, notes). By default all that the device runs; ConfigError for a named one that it does not."""
    kept, notes = [], []
    for text in schemes or SCHEMES:
        scheme = QuantScheme.parse(text)
        try:
            _check_device(scheme, device)
        except ConfigError as error:
            if schemes:
                raise
            notes.append(f"left out: {error}")
            continue
        if str(scheme) in kept:
            raise ConfigError(f"--schemes names {scheme} twice")
        kept.append(str(scheme))
    return kept, notes


def _check_device(scheme: QuantScheme, device: str) -> None:
    if device == "cpu":
        if scheme.activation_format == "fp8":
            raise ConfigError(f"--schemes {scheme} needs a GPU engine: on a CPU use bf16, w4a16 or w8a8")
        return
    check_card(scheme, torch.cuda.get_device_capability(), torch.cuda.get_device_name())


def learner_scheme(scheme: str) -> str:
    """The scheme that the learner computes in: BF16 where only the rollout is quantized."""
    return scheme if QuantScheme.parse(scheme).aligned else "bf16"


def engine_scheme(scheme: str) -> str:
    return scheme.removesuffix(":rollout")


@dataclass(frozen=True)
class Model:
    """A shape at a depth: its config, what the memory estimate knows of it, its Newton-Schulz operations."""

    config: object
    shape: ModelShape
    newton_schulz: float
    largest_layer: int
    layer_weights: int

    @classmethod
    @lru_cache
    def of(cls, shape: str, layers: int | None, scheme: str) -> "Model":
        config = sync.config_of(shape, layers)
        model = meta_model(config, shape)
        matrices = matrix_shapes(model)
        parsed = QuantScheme.parse(scheme)
        report = convert_model(model, parsed)
        for plan in report.quantized:
            parsed.check_layer(plan.name, plan.out_features, plan.in_features)
        if not parsed.quantized:  # what other schemes would quantize: bytes and operations of the roofline are of these weights
            report = convert_model(meta_model(config, shape), QuantScheme.parse("w8a8"))
        facts = ModelShape.of(model, report, config)
        in_layers = sum(p.numel() for name, p in model.named_parameters() if ".layers.0." in name)
        return cls(config, facts, newton_schulz_operations(matrices), facts.largest, in_layers)

    def bounds(self, scheme: str, card: str) -> Bounds | None:
        found = card_of(card)
        if found is None:
            return None
        experts = getattr(self.config, "num_experts", 0) or 0
        each = getattr(self.config, "num_experts_per_tok", 0) if experts else 0
        return Bounds(found, self.shape, QuantScheme.parse(scheme), self.newton_schulz, experts, each)


def learner_problem(args, model: Model, card_bytes: int | None, layers: int) -> str | None:
    """Why a learner of so many layers does not fit, with what would; None if it does or there is no card to compare with."""
    if card_bytes is None:
        return None
    args.train.colocate_all = False  # no engine beside it
    problem = estimate(args, model.shape)[0].problem(card_bytes)
    if problem is None:
        return None
    return f"--layers {layers}: {problem} (fewer --layers, or a smaller --tokens, also lower it)"


def depths(shape: str, problem, card_bytes: int | None) -> list[int]:
    """Depths to measure the learner at: the whole model if it fits, else three, evenly up to the deepest that fits.

    problem: layers -> why that depth does not fit, or None. ConfigError where no three depths fit.
    """
    full = sync.config_of(shape, None).num_hidden_layers
    if card_bytes is None or problem(full) is None:
        return [full]
    deepest = next((n for n in range(full - 1, 2, -1) if problem(n) is None), None)
    if deepest is None:
        raise ConfigError(f"no three depths of {shape} fit: {problem(3)}")
    deepest = min(deepest, 12)  # deeper adds time, not accuracy
    return sorted({max(1, deepest // 3), max(2, 2 * deepest // 3), deepest})


def kv_bytes(
    model: Model, scheme: str, workload: Workload, card_bytes: int, *, tp: int = 1, alone: bool = False, bucket_mb: int = 512
) -> int:
    """KV cache for the whole rollout, or as much of it as fits beside the engine's weights and what pushes to it.

    ConfigError where not even one response fits. alone: the engine has its GPU to itself.
    """
    shape, parsed = model.shape, QuantScheme.parse(scheme)
    packed = packed_bytes(parsed)
    weights = int((shape.quantized * packed + 2 * (shape.parameters - shape.quantized)) / tp)
    beside = ENGINE_WORK + CONTEXT
    if not alone:
        kept = 2 * model.layer_weights + 2 * 2 * shape.largest_other
        beside += CONTEXT + kept + 2 * max(bucket_mb * 2**20, int(shape.largest * packed), 2 * shape.largest_other)
    room = int(card_bytes * USABLE) - weights - beside
    a_token = kv_bytes_per_token(shape, tp)
    longest = workload.prompt + workload.response
    one = a_token * longest
    if room < one:
        raise ConfigError(
            f"--schemes {scheme}: no room for a KV cache: engine weights {gib(weights)} and {gib(beside)} beside them leave "
            f"{gib(max(0, room))} of {gib(card_bytes)}, one response of {longest} tokens needs {gib(one)}: "
            "fewer --rollout_layers, a larger --tp, a larger card, or leave the scheme out"
        )
    blocks = -(-longest // 16) + 1
    return min(room, a_token * 16 * blocks * workload.sequences + 2**28)
