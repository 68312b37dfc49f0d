"""Log-probs and entropies of tokens from the BF16 logits that lm_head gives: one read of the logits, one more for the gradient.

    z = logits / temperature    log p(y) = z_y - logsumexp z    H = logsumexp z - sum_v p_v z_v
    dz_v = g ([v = y] - p_v) - g_H p_v (z_v - logsumexp z + H)

Bound by memory. PyTorch's operations widen the logits to float32 and pass over them several times: 22 bytes a logit forward and 44
backward, by count; here 2 and 4. All arithmetic is in float32, the gradient is rounded once, where the logits were.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_openrlhf.kernels.library import op
from qarl_openrlhf.kernels.rounding import narrow, widen

_TILE = (4, 1024)  # a thread of four warps holds 8 neighbouring logits of each of 4 lines: maxima need no other thread
_WARPS = 4
_LOWEST = tl.constexpr(-3.0e38)  # finite: a logit of -inf must not make inf - inf


@triton.jit
def _read_kernel(
    logits, targets, values, normalisers, V, stride, inverse, LINES: tl.constexpr, WIDTH: tl.constexpr, ENTROPY: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, LINES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    # For each of WIDTH columns, of d = z - the largest z so far: sum of e^d, and of d e^d.
    most = tl.full((WIDTH,), _LOWEST, dtype=tl.float32)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    weighted = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, V, LINES * WIDTH):
        z = widen(tl.load(logits + row * stride + start + at, mask=start + at < V, other=float("-inf"))) * inverse
        larger = tl.maximum(most, tl.max(z, 0))
        d = z - larger[None, :]
        power = tl.exp(d)
        rescale = tl.exp(most - larger)
        if ENTROPY:
            weighted = (weighted + (most - larger) * total) * rescale + tl.sum(tl.where(power > 0.0, power * d, 0.0), 0)
        total = total * rescale + tl.sum(power, 0)
        most = larger
    largest = tl.max(most, 0)
    rescale = tl.exp(most - largest)
    sum_all = tl.sum(total * rescale, 0)
    log_sum = tl.log(sum_all)
    chosen = widen(tl.load(logits + row * stride + tl.load(targets + row))) * inverse
    log_prob = (chosen - largest) - log_sum
    tl.store(normalisers + row, largest + log_sum)
    if ENTROPY:
        tl.store(values + row * 2, log_prob)
        tl.store(values + row * 2 + 1, log_sum - tl.sum((weighted + (most - largest) * total) * rescale, 0) / sum_all)
    else:
        tl.store(values + row, log_prob)


@triton.jit
def _gradient_kernel(
    logits, targets, values, normalisers, gradients, V, stride, inverse,
    LINES: tl.constexpr, WIDTH: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * LINES * WIDTH + tl.arange(0, LINES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    place = logits + row * stride + at
    log_p = widen(tl.load(place, mask=at < V, other=0.0)) * inverse - tl.load(normalisers + row)
    columns: tl.constexpr = 2 if ENTROPY else 1
    by_log_prob = tl.load(gradients + row * columns)
    if ENTROPY:
        by_entropy = tl.load(gradients + row * 2 + 1)
        p = tl.exp(log_p)
        d = ((log_p + tl.load(values + row * 2 + 1)) * (-by_entropy) - by_log_prob) * p
        d = tl.where(p == 0.0, 0.0, d)  # a logit of -inf
    else:
        d = tl.exp(log_p) * (-by_log_prob)
    d = tl.where(at == tl.load(targets + row), d + by_log_prob, d)
    tl.store(place, narrow(d * inverse), mask=at < V)


def _outputs(logits: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return logits.new_empty((rows, 1 + entropy), dtype=torch.float32), logits.new_empty(rows, dtype=torch.float32)


@op("token_log_probs(Tensor logits, Tensor targets, float temperature, bool entropy) -> (Tensor, Tensor)", _outputs)
def token_log_probs(logits: Tensor, targets: Tensor, temperature: float, entropy: bool):
    """BF16 logits ``[N, V]`` (rows contiguous), int64 targets ``[N]`` -> float32 (values ``[N, 1 or 2]``, logsumexp z ``[N]``).

    Column 0 of values: log p(target); column 1, with entropy: H.
    """
    values, normalisers = _outputs(logits, targets, temperature, entropy)
    if len(logits):
        _read_kernel[(len(logits),)](
            _rows(logits), targets.contiguous(), values, normalisers, logits.shape[1], logits.stride(0), 1 / temperature,
            *_TILE, entropy, num_warps=_WARPS,
        )  # fmt: skip
    return values, normalisers


@op(
    "token_log_probs_backward_(Tensor(a!) logits, Tensor targets, Tensor values, Tensor normalisers, Tensor gradients, "
    "float temperature) -> ()",
    lambda *args: None,
)
def token_log_probs_backward_(
    logits: Tensor, targets: Tensor, values: Tensor, normalisers: Tensor, gradients: Tensor, temperature: float
):
    """Overwrites the logits with their gradient; gradients: float32 like values, what came out of :func:`token_log_probs`."""
    if len(logits):
        grid = (len(logits), triton.cdiv(logits.shape[1], _TILE[0] * _TILE[1]))
        _gradient_kernel[grid](
            _rows(logits), targets.contiguous(), values.contiguous(), normalisers.contiguous(), gradients.contiguous(),
            logits.shape[1], logits.stride(0), 1 / temperature, *_TILE, values.shape[1] == 2, num_warps=_WARPS,
        )  # fmt: skip


def _rows(logits: Tensor) -> Tensor:
    if logits.dtype != torch.bfloat16 or logits.stride(-1) != 1:
        raise TypeError(f"token_log_probs takes bfloat16 logits with contiguous rows, not {logits.dtype} of strides {logits.stride()}")
    return logits
