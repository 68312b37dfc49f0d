"""Bytes of main memory that learners take for what is not, or not always, on their GPU; and the pieces it is cut into."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qarl_openrlhf.planning.model_shape import ModelShape

SUB_GROUP = 1_000_000_000  # of ZeRO-3: weights of a rank after which a piece of the optimizer ends, with a whole tensor
MOMENT_8BIT = (1, 4 / 256)  # bytes a weight of an 8-bit moment's two tensors: codes, and float32 scales of 256


def data_parallel(args) -> int:
    """Learners that each see other samples: what ZeRO shares states out over."""
    return args.actor.num_nodes * args.actor.num_gpus_per_node


def eight_bits(args) -> bool:
    """Whether the optimizer keeps 8-bit moments."""
    return args.actor.optim == "adam" and args.actor.adam.state_bits == 8


def pinned(size: int) -> int:
    """What PyTorch takes for a pinned buffer of so many bytes: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def pieces(args, shape: ModelShape) -> Iterator[tuple[int, int]]:
    """(weights of one rank, moments) of each flat FP32 tensor that the optimizer steps: under ZeRO-3 whole tensors up to ``SUB_GROUP``
    and the one that exceeds it, else all that are updated alike."""
    copies = data_parallel(args) if args.ds.zero_stage else 1
    if args.actor.optim == "muon":  # AdamW, with its two moments, gets what Muon leaves
        groups = [(shape.matrices, True, 1), (shape.parameters - shape.matrices, False, 2)]
    else:
        groups = [(shape.parameters, None, 2)]
    for weights, of_muon, moments in groups:
        if args.ds.zero_stage < 3:
            yield weights // copies, moments
            continue
        piece = 0
        for tensor, is_matrix in shape.tensors:
            if of_muon in (None, is_matrix):
                piece += -(-tensor // copies)
                if piece >= SUB_GROUP:
                    yield piece, moments
                    piece = 0
        if piece:
            yield piece, moments


def offloaded(args, shape: ModelShape, pin=pinned) -> int:
    """Bytes of main memory a node, for what learners keep there: for good, or while the engines sample. ``pin``: of a pinned buffer."""
    offload, stage = args.ds.adam_offload, args.ds.zero_stage
    if not (offload or args.ds.enable_sleep):
        return 0
    ranks, p = args.actor.num_gpus_per_node, shape.parameters
    copies = data_parallel(args) if stage else 1
    flats = list(pieces(args, shape))
    floats = sum(pin(4 * weights) for weights, _ in flats)
    if not offload:
        widths = MOMENT_8BIT if eight_bits(args) else (4,)
        moments = sum(count * pin(int(width * weights)) for weights, count in flats for width in widths)
        return ranks * (floats + moments + pin(2 * p // copies))
    states = sum(4 * count * weights for weights, count in flats)  # not pinned
    if stage == 3:  # master weights (not pinned), gradients in FP32 for the step, accumulated ones in BF16
        return ranks * (states + 4 * p // copies + floats + pin(2 * p // copies))
    # Both in FP32, the BF16 weights to be sent back, a buffer a tensor of accumulated gradients, and one for the largest on its way.
    accumulated = 2 * p // copies + pin(2 * max(shape.largest, shape.largest_other))
    return ranks * (states + 2 * floats + sum(pin(2 * weights) for weights, _ in flats) + accumulated)


def average_bytes(args, shape: ModelShape, pin=pinned) -> tuple[int, int]:
    """(of a GPU, of a node's main memory) for ``--train.enable_ema``: a BF16 model, and a float32 copy of what a rank updates.

    OpenRLHF offloads that model, which DeepSpeed does under ZeRO-3 only, tensor by tensor; under others it is whole on every GPU.
    """
    if not args.train.enable_ema:
        return 0, 0
    copies = data_parallel(args)
    floats = 4 * shape.parameters // copies
    if args.ds.zero_stage < 3:
        return 2 * shape.parameters + floats, 0
    return 0, args.actor.num_gpus_per_node * (sum(pin(2 * -(-tensor // copies)) for tensor, _ in shape.tensors) + floats)
