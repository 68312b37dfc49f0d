"""Weights that quantizers get wrong."""

import torch


def cases(n: int, k: int, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    """name -> weight [n, k]; k a multiple of 128."""
    g = torch.Generator().manual_seed(7)
    normal = lambda: torch.randn(n, k, generator=g)  # noqa: E731
    out = {"random": normal() * 0.02, "wide": normal() * torch.exp(4 * torch.randn(n, 1, generator=g))}
    # Multiples of half a step of the exact scale: every quotient is a rounding tie.
    for name, half_range in (("ties_int4", 7.5), ("ties_int8", 127.5)):
        steps = torch.randint(-int(2 * half_range), int(2 * half_range) + 1, (n, k), generator=g)
        steps[:, ::32] = int(2 * half_range)
        out[name] = steps * 0.5 * 2.0**-6
    out["zero_groups"] = normal() * 0.02
    out["zero_groups"][::2, :128] = 0
    out["zero_groups"][1] = 0
    out["negative_zero"] = -torch.zeros(n, k)
    out["outlier"] = normal() * 1e-3
    out["outlier"][:, 5] = 30.0
    out["tiny_beside_large"] = normal() * torch.logspace(-9, 0, k)
    out["one_sided"] = -normal().abs()
    out["denormal"] = normal() * 2.0**-130
    out["smallest"] = torch.randint(-3, 4, (n, k), generator=g) * 2.0**-133
    out["large"] = normal().clamp(-3, 3) * 1e4
    return {name: w.to(dtype) for name, w in out.items()}
