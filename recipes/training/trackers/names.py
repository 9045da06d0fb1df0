"""The names under which every tracker has a run's metrics: those of ``metrics.jsonl``."""

from __future__ import annotations

from ..callbacks import Metrics


def named(metrics: Metrics) -> dict[str, float]:
    """Return metrics under the names of trackers: ``epoch``, ``train/loss``, ``val/top1``, ..."""
    values = {f"{metrics.split}/{name}": value for name, value in metrics.values.items()}
    return {"epoch": metrics.epoch, **values}
