"""Fewer points that look like all of them."""

import math
from collections.abc import Sequence

__all__ = ["largest_triangles"]


def largest_triangles(x: Sequence[float], y: Sequence[float], num_points: int) -> list[int]:
    """Choose points of a curve so that its shape stays, peaks included.

    The first and the last point stay; of each stretch between, the one that spans the largest triangle with its
    neighbours. Points that are not finite stay as well where there are few of them: they are what is looked for.

    Args:
        x: Where the points are, in rising order.
        y: The points.
        num_points: How many to choose, 3 or more.

    Returns:
        Their indices, in order.

    Reference:
        Steinarsson, "Downsampling Time Series for Visual Representation", 2013.

    Example:
        >>> largest_triangles(range(7), [0, 0, 0, 9, 0, 0, 0], 3)
        [0, 3, 6]
    """
    finite = [index for index, value in enumerate(y) if math.isfinite(value)]
    others = [index for index, value in enumerate(y) if not math.isfinite(value)]
    if len(others) > num_points:
        others = others[:: math.ceil(len(others) / num_points)]
    if len(finite) <= num_points:
        return sorted(finite + others)
    chosen = [finite[0]]
    width = (len(finite) - 2) / (num_points - 2)
    for number in range(num_points - 2):
        begin, end = 1 + int(number * width), 1 + int((number + 1) * width)
        after = finite[end : max(end + 1, 1 + int((number + 2) * width))] or finite[-1:]
        mean_x, mean_y = sum(x[i] for i in after) / len(after), sum(y[i] for i in after) / len(after)
        last_x, last_y = x[chosen[-1]], y[chosen[-1]]
        chosen.append(
            max(
                finite[begin : max(end, begin + 1)],
                key=lambda i: abs((last_x - mean_x) * (y[i] - last_y) - (last_x - x[i]) * (mean_y - last_y)),
            )
        )
    return sorted([*chosen, finite[-1], *others])
