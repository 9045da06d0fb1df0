"""Draw a long curve with fewer points, and keep its extremes."""

from __future__ import annotations

from collections.abc import Sequence


def kept(values: Sequence[float | None], most: int) -> list[int]:
    """Return the indices of the points to draw, ascending.

    A curve of more than ``most`` points is cut into equal parts, of which the first point, the
    least, the greatest and the first without a value are kept, and the last point of all. So a
    single spike stays visible, and so does a value that is not finite.

    Args:
        values: The values of the curve; None where one is not finite.
        most: Number of points, at least 8.
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    parts = (most - 1) // 4
    found = {count - 1}
    for part in range(parts):
        inside = range(part * count // parts, (part + 1) * count // parts)
        found.add(inside[0])
        present = [(value, i) for i in inside if (value := values[i]) is not None]
        if present:
            found |= {min(present)[1], max(present)[1]}
        if len(present) < len(inside):
            found.add(next(i for i in inside if values[i] is None))
    return sorted(found)
