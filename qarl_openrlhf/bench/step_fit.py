"""A time as a line in the number of layers: what a card holds at a few depths says what the whole model takes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """``fixed + per_layer * layers``; ``residual``: largest distance of a point from it, as a fraction of the point."""

    fixed: float
    per_layer: float
    residual: float

    def at(self, layers: int) -> float:
        return self.fixed + self.per_layer * layers


def fit(points: dict[int, float]) -> Line:
    """Least squares over {layers: value}, with a slope of 0 or more: a time that falls with depth is noise around its mean.

    ValueError for fewer than three depths: two always lie on a line.
    """
    if len(points) < 3:
        raise ValueError(f"a line through {len(points)} depths has no residual: measure three or more")
    n, xs, ys = len(points), list(points), list(points.values())
    mean_x, mean_y = sum(xs) / n, sum(ys) / n
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points.items()) / sum((x - mean_x) ** 2 for x in xs)
    slope = max(slope, 0.0)
    line = Line(mean_y - slope * mean_x, slope, 0.0)
    largest = max((abs(line.at(x) - y) / abs(y) for x, y in points.items() if y), default=0.0)
    return Line(line.fixed, line.per_layer, largest)


def full_depth(points: dict[int, float], layers: int) -> tuple[float, Line | None]:
    """(value at ``layers``, the line through all depths, None for fewer than three). Measured there: that value."""
    line = fit(points) if len(points) >= 3 else None
    if layers in points:
        return points[layers], line
    return (line or fit(points)).at(layers), line
