"""Draws clipping_regions.png: where each objective pushes on a token, from the objectives' own gradients.

    python docs/figures/clipping_regions.py [OUT.png]

After Figure 3 of the QaRL paper (arXiv 2604.07853).
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from qarl_openrlhf.objectives import Units, build_objective, find_spec

TOKEN = ("grpo_tis", "dual_clip", "cispo", "sapo")
RESPONSE = ("gspo", "tbpo")
GREY, RED = "0.85", "#f4b6a6"


def push(name: str, log_ratio: torch.Tensor, A: float) -> torch.Tensor:
    """d(objective) / d(logpi) of one-token responses with w = 1, by log r."""
    x, zero = log_ratio[:, None], torch.zeros(len(log_ratio), 1)
    return build_objective(name).token_coefficients(x, zero, zero, torch.full((len(x),), A), torch.ones_like(x))[:, 0]


def above(name: str, log_ratio: torch.Tensor, A: float) -> torch.Tensor:
    """Where the report counts the ratio as above its band."""
    surrogate = find_spec(name)(Units(log_ratio, torch.full_like(log_ratio, A), torch.zeros_like(log_ratio)))
    return torch.zeros_like(log_ratio).bool() if surrogate.above is None else surrogate.above


def main(out: Path) -> None:
    figure, axes = plt.subplots(2, 6, figsize=(15, 5), sharey="row", layout="constrained")
    for column, name in enumerate(TOKEN + RESPONSE):
        r = torch.linspace(0.02, 4.2, 1000) if name in TOKEN else torch.linspace(1 - 1.2e-3, 1 + 1.2e-3, 1000)
        x = r if name in TOKEN else (r.double() - 1).mul(1e4)
        for row, A in enumerate((1.0, -1.0)):
            axis, y = axes[row, column], push(name, r.log(), A)
            ends = axis.get_xaxis_transform()
            axis.fill_between(x, 0, 1, where=y == 0, color=GREY, transform=ends, linewidth=0)
            if A < 0:
                pushed = above(name, r.log(), A) & (y != 0)
                axis.fill_between(x, 0, 1, where=pushed, color=RED, transform=ends, linewidth=0)
            axis.plot(x, y, color="C0", linewidth=2)
            axis.axvline(1.0 if name in TOKEN else 0.0, color="0.5", linewidth=0.8, linestyle=":")
            axis.set_ylim((-0.15, 1.6) if A > 0 else (-4.3, 0.4))
            axis.set_xlim(float(x[0]), float(x[-1]))
        axes[0, column].set_title(name)
        axes[1, column].set_xlabel("token ratio $r_t$" if name in TOKEN else "response ratio, $(r - 1) \\times 10^4$")
    axes[0, 0].set_ylabel("A = +1\n$\\partial J / \\partial \\log\\pi$")
    axes[1, 0].set_ylabel("A = $-$1\n$\\partial J / \\partial \\log\\pi$")
    figure.suptitle("grey: no gradient (clipped).  red: above the band with A < 0, and still pushed", fontsize=11)
    figure.savefig(out, dpi=90)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
