"""Orthogonalising many matrices at once: the iteration of Muon (https://kellerjordan.github.io/posts/muon/).

Same coefficients, precision (BF16) and order of operations as ``torch.optim.Muon``, which takes one 2-D matrix at a time: a
mixture-of-experts model has tens of thousands, far too many launches for one each.
"""

import torch
from torch import Tensor

from qarl_openrlhf.kernels import product

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """``[S, N, K]`` -> BF16 ``[S, N, K]``: each matrix with its singular values brought to about 1 (0.7 to 1.2)."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = product.matmul(x, x.mT, torch.bfloat16)
        polynomial = _multiply_add(gram, gram, gram, b, c)
        x = _multiply_add(x, polynomial, x, a, 1.0)
    return x.mT if tall else x


def _multiply_add(added: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """``beta * added + alpha * left @ right``, rounded once."""
    if product.in_float32(left):
        return torch.baddbmm(added.float(), left.float(), right.float(), beta=beta, alpha=alpha).bfloat16()
    return torch.baddbmm(added, left, right, beta=beta, alpha=alpha)


def scale(kind: str, rows: int, columns: int) -> float:
    """What the learning rate of a matrix is multiplied by.

    ``match_rms``: 0.2 sqrt(max(rows, columns)), which gives the update the RMS of an AdamW update, so that AdamW's learning
    rates carry over (https://arxiv.org/abs/2502.16982). ``spectral``: sqrt(max(1, rows / columns)), Muon's original.
    """
    if kind == "match_rms":
        return 0.2 * max(rows, columns) ** 0.5
    if kind == "spectral":
        return max(1.0, rows / columns) ** 0.5
    raise ValueError(f"--actor.muon.scale {kind} is unknown: use match_rms or spectral")
