"""Numbers, lengths, times, lists and rules of a plan as text, for every screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..comm import Rule
    from ..lars import Span


def count(number: float, one: str, several: str = "") -> str:
    """A number of things: ``1 rank``, ``1,024 ranks``; ``several`` is the plural if irregular."""
    text = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{text} {one if number == 1 else several or one + 's'}"


def folded(
    parts: Sequence[str], room: int, separator: str = ", ", others: str = "and {} more"
) -> str:
    """Join as many parts as fit into ``room`` characters, at least one, and count the others."""
    text = separator.join(parts)
    kept = len(parts)
    while len(text) > room and kept > 1:
        kept -= 1
        text = separator.join([*parts[:kept], others.format(len(parts) - kept)])
    return text


def in_full(length: Span) -> str:
    """A length of training in words: ``31 epochs``, ``500 steps`` or ``10 % of the run``."""
    if length.unit == "dur":
        return f"{100 * length.value:g} % of the run"
    return count(length.value, "epoch" if length.unit else "step")


def binary_size(number: int) -> str:
    """A number of bytes in the largest binary unit that it fills: ``25 MiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number} B"


def decimal_size(number: int) -> str:
    """A number of bytes in decimal units, as memory is sold: ``413 MB`` or ``11.2 GB``."""
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def rate(per_second: float) -> str:
    """A number per second as text: ``0.32``, ``41.8`` or ``18,432``."""
    if per_second >= 100:
        return f"{per_second:,.0f}"
    return f"{per_second:.1f}" if per_second >= 1 else f"{per_second:.2g}"


def duration(seconds: float) -> str:
    """A time as text: ``45 s``, ``6.6 min``, ``14 h 05 min`` or ``3 d 04 h``."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.1f} min" if seconds < 600 else f"{seconds / 60:.0f} min"
    minutes = round(seconds / 60)
    if minutes < 72 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24:02d} h"


def short_duration(seconds: float) -> str:
    """A time in at most six characters up to 99 days: ``45s``, ``6m05s``, ``14h05m``, ``3d04h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def describe_rule(rule: Rule) -> str:
    """A rule of a plan without its sizes: ``hierarchical in chunks of 2 MiB in fp16``."""
    parts = [rule.algorithm]
    if rule.shape:
        parts.append("x".join(map(str, rule.shape)))
    if rule.chunk_bytes:
        parts.append(f"in chunks of {binary_size(rule.chunk_bytes)}")
    if rule.wire_dtype:
        parts.append(f"in {rule.wire_dtype}")
    if rule.sum_dtype:
        parts.append(f"summed in {rule.sum_dtype}")
    return " ".join(parts)
