"""A run's metrics, as JSON lines and for TensorBoard."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import RecipeError

METRICS = "metrics.jsonl"


class MetricsLog:
    """Appends to ``metrics.jsonl`` and writes TensorBoard events beside it.

    Args:
        run_dir: the run's folder; it must exist.
        step: where the run goes on from. Lines after it, of steps that will be made again, go.
    """

    def __init__(self, run_dir: Path, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = run_dir / METRICS
        kept = [line for line in read_metrics(run_dir) if line["step"] <= step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(partial, path)
        self._file = path.open("a", buffering=1)
        self._writer: Any = SummaryWriter(
            str(run_dir / "tensorboard"), purge_step=step + 1 if step else None
        )

    def write(
        self,
        split: str,
        step: int,
        epoch: float,
        values: dict[str, float],
        lists: dict[str, list[float]] | None = None,
    ) -> None:
        """Add one line.

        Args:
            split: ``train`` or ``val``.
            step: updates made.
            epoch: epochs of images given out.
            values: as they stand; those that are not finite become null, as JSON has none.
            lists: one number for each step since the last line.
        """
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        line = {"split": split, "step": step, "epoch": round(epoch, 4), **finite, **(lists or {})}
        self._file.write(json.dumps(line) + "\n")
        for name, value in values.items():
            self._writer.add_scalar(f"{split}/{name}", value, step)

    def histograms(self, split: str, step: int, epoch: float, values: dict[str, Tensor]) -> None:
        """Add one line with the least, median and most of each of ``values``, shape ``[n]``, and
        their histograms for TensorBoard."""
        line: dict[str, Any] = {"split": split, "step": step, "epoch": round(epoch, 4)}
        for name, of_name in values.items():
            line[name] = [v.item() for v in (of_name.min(), of_name.median(), of_name.max())]
            self._writer.add_histogram(f"{split}/{name}", of_name, step)
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        self._writer.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of a run's metrics in order; none if there are none.

    A last line that a crash cut short is left out.

    Raises:
        RecipeError: a line is not one that :meth:`MetricsLog.write` writes.
    """
    path = run_dir / METRICS
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [_parse(line, f"{path}:{i}") for i, line in enumerate(lines[:-1], 1) if line]


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        content: Any = json.loads(line)
    except ValueError:
        content = None
    if not isinstance(content, dict) or not content.keys() >= {"split", "step", "epoch"}:
        raise RecipeError(
            f"{where}: not a line of metrics, an object with the keys split, step and epoch; "
            "mend or remove it"
        )
    return content
