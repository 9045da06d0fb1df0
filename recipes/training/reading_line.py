"""A reading of the meters or an evaluation as one line, in columns that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .time_left import short_duration
from .wording import rate


class Part(NamedTuple):
    """A column of a line.

    Attributes:
        text: What it shows.
        importance: Which columns go first where there is no room for all: those of the lowest.
    """

    text: str
    importance: int


#: Importance of the columns that stay longest.
_FIRST = 9


def place(split: str, step: int, steps: int, epoch: float, epochs: float) -> list[Part]:
    """Say where a run is: the split, the epoch, and the step.

    Args:
        split: ``train`` or ``val``.
        step: Number of steps made.
        steps: Number of steps that the run makes, for the width.
        epoch: Epochs of images read.
        epochs: Number of epochs that the run has, for the width.
    """
    return [
        Part(f"{split:5}", _FIRST),
        Part(f"epoch {epoch:{len(f'{epochs:.2f}')}.2f}", 4),
        Part(f"step {step:{len(str(steps))}}", 2),
    ]


def of_training(values: dict[str, float], total_memory: int | None = None) -> list[Part]:
    """Return the columns of a reading of the training steps.

    Args:
        values: Its metrics.
        total_memory: Memory of the device, in bytes, if it has a limit of its own.
    """
    parts = [
        *_scores(values),
        Part(f"lr {values['lr']:<8.3g}", 4),
        Part(f"{rate(values['images_per_second']):>6} images/s", 6),
        Part(f"wait {values['wait_seconds'] / max(values['seconds'], 1e-9):3.0%}", 3),
    ]
    if "memory_bytes" in values:
        parts.append(Part(_memory(values["memory_bytes"] / 1e9, total_memory), 1))
    return parts


def of_evaluation(values: dict[str, float], best: tuple[float, float]) -> list[Part]:
    """Return the columns of an evaluation.

    Args:
        values: Its metrics.
        best: The best top-1 accuracy so far, in percent, and its epoch.
    """
    parts = [*_scores(values), Part(f"best {best[0]:6.2f}% at epoch {best[1]:.2f}", 5)]
    if "ema_top1" in values:
        parts.append(Part(f"EMA {values['ema_top1']:6.2f}%", 6))
    return [*parts, Part(f"evaluated in {values['seconds']:.1f} s", 1)]


def time_left(seconds: float | None) -> list[Part]:
    """Return the column of the time left; none where it is not known yet."""
    return [] if seconds is None else [Part(f"left {short_duration(seconds):>6}", 5)]


def holding_up(ranks: str) -> list[Part]:
    """Return the column of the ranks that hold the others up; none without any."""
    return [Part(f"slow: {ranks}", 7)] if ranks else []


def joined(parts: Sequence[Part], width: int | None = None) -> str:
    """Join columns to a line.

    Args:
        parts: The columns.
        width: The most characters that it may have; None: any number. Columns are left out where
            they find no room beside those that are more important; the others keep their order.
    """
    kept: set[int] = set()
    for number in sorted(range(len(parts)), key=lambda number: -parts[number].importance):
        if width is None or len(_line(parts, kept | {number})) <= width:
            kept.add(number)
    return _line(parts, kept)


def _line(parts: Sequence[Part], kept: set[int]) -> str:
    return "  ".join(part.text for number, part in enumerate(parts) if number in kept).rstrip()


def _memory(used: float, total: int | None) -> str:
    """Gigabytes in use, out of those that there are, in as many characters at each reading."""
    if total:
        whole = f"{total / 1e9:.0f}"
        return f"{used:{len(whole)}.0f}/{whole} GB"
    return f"{used:4.1f} GB" if used < 99.95 else f"{used:4.0f} GB"


def _scores(values: dict[str, float]) -> list[Part]:
    # Where a run stops between two readings, accuracy was not measured.
    top1 = f"{values['top1']:6.2f}%" if "top1" in values else f"{'-':>7}"
    return [Part(f"loss {values['loss']:6.3f}", _FIRST), Part(f"top-1 {top1}", 8)]
