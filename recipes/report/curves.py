"""The curves of runs, and the charts that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..files import number
from ..training.folder.outcome import Line
from ..training.watch.clocks import PHASES
from .groups import Group
from .run import Run

TRAINING, VALIDATION, AVERAGE = "training", "validation", "validation, EMA of weights"
_SHARE = "% of time"

#: Of each chart: its heading, the unit, and the key of the lines by label of the curve.
_CHARTS = (
    ("Loss", "", {TRAINING: "loss", VALIDATION: "loss", AVERAGE: "ema_loss"}),
    ("Top-1 accuracy", "%", {TRAINING: "top1", VALIDATION: "top1", AVERAGE: "ema_top1"}),
    ("Learning rate", "", {TRAINING: "lr"}),
    ("Global batch size", "images", {TRAINING: "batch_size"}),
    ("Gradient norm before clipping", "", {TRAINING: "gradient_norm"}),
    ("Gradient noise scale", "images", {TRAINING: "noise_scale"}),
    ("Loss scale", "", {TRAINING: "loss_scale"}),
    ("Steps skipped so far", "", {TRAINING: "skipped_steps"}),
    ("Throughput", "images/s", {TRAINING: "images_per_second"}),
    ("Memory", "GB", {TRAINING: "memory_bytes"}),
    ("GPU utilisation", "%", {TRAINING: "gpu_utilisation"}),
    ("GPU power", "W", {TRAINING: "gpu_power_watts"}),
    ("Wait for input, slowest rank", _SHARE, {TRAINING: "wait_seconds"}),
    ("Wait for the all-reduce", _SHARE, {TRAINING: "all_reduce_wait_seconds"}),
)
#: Keys of the lines of training that have no chart.
_NO_CHART = {
    *("split", "step", "epoch", "seconds", "top5", "noise_scale_error", "step_wait_seconds"),
    *("least_all_reduce_wait_seconds", "slowest_rank", "slowest_rank_seconds", *PHASES),
}


@dataclass(frozen=True)
class Curve:
    """A curve: what it is of, its run, and its values by step, None where one is not finite."""

    label: str
    name: str
    run: Run
    steps: list[int]
    values: list[float | None]


@dataclass(frozen=True)
class Chart:
    """A chart: its heading, the unit of its values, and its curves."""

    title: str
    unit: str
    curves: list[Curve]

    @property
    def is_loss(self) -> bool:
        """Whether it shows a loss."""
        return self.title.startswith(_CHARTS[0][0]) and self.title != "Loss scale"

    @property
    def may_be_log(self) -> bool:
        """Whether its values may span powers of ten."""
        return self.is_loss or self.title.startswith(("Gradient", "Loss"))


def charts(found: Sequence[Group]) -> list[Chart]:
    """Return the charts of some runs that have curves, those of keys unknown here last.

    A single run's chart has a curve for each split. Of several runs there is a chart for each
    split, without the top-1 of single steps, which is too noisy to compare.
    """
    runs = {name: run for group in found for name, run in group.runs.items()}
    known = {key for _, _, keys in _CHARTS for key in keys.values()} | _NO_CHART
    further = {
        key: (key, _SHARE if key.endswith("_seconds") else "", {TRAINING: key})
        for run in runs.values()
        for line in run.train
        for key, value in line.items()
        if key not in known and number(value) is not None
    }
    drawn = []
    for title, unit, keys in (*_CHARTS, *further.values()):
        curves = [_curve(of, key, name, runs[name]) for of, key in keys.items() for name in runs]
        if len(runs) == 1:
            drawn.append(Chart(title, unit, [curve for curve in curves if curve.steps]))
            continue
        for label in sorted(keys, key=lambda label: label == TRAINING):
            if (title, label) != ("Top-1 accuracy", TRAINING):
                of_label = [curve for curve in curves if curve.steps and curve.label == label]
                drawn.append(Chart(f"{title}, {label}" if len(keys) > 1 else title, unit, of_label))
    return [chart for chart in drawn if chart.curves]


def cut(chart: Chart) -> float | None:
    """Return where to cut the axis of a chart of losses, so that one that runs away hides no other.

    That is at twice the greatest first loss of the runs that did not diverge, if any loss is more
    than three times as great, so the first losses of a healthy run are always inside. Else None.
    """
    known = [(c.run.status, [v for v in c.values if v is not None]) for c in chart.curves]
    first = [(status == "diverged", values[0]) for status, values in known if values]
    if not chart.is_loss or not first:
        return None
    healthy = [loss for diverged, loss in first if not diverged]
    base = max(healthy) if healthy else min(loss for _, loss in first)
    greatest = max(value for _, values in known for value in values)
    return float(f"{2 * base:.2g}") if 0 < 3 * base < greatest else None


def _curve(label: str, key: str, name: str, run: Run) -> Curve:
    """The curve of a key; that of the learning rate of each step, where its schedule is known."""
    if key == "lr" and run.schedule:
        steps = list(range(run.step))
        return Curve(label, name, run, steps, [run.schedule(step) for step in steps])
    lines = [line for line in (run.train if label == TRAINING else run.val) if key in line]
    return Curve(label, name, run, [n["step"] for n in lines], [_value(n, key) for n in lines])


def _value(line: Line, key: str) -> float | None:
    """The value of a key in the unit of its chart; of seconds, the share of those of the line."""
    value, seconds = number(line[key]), number(line.get("seconds"))
    if value is None or not key.endswith("_seconds"):
        return value and value / 1e9 if key == "memory_bytes" else value
    return round(100 * value / seconds, 4) if seconds else None
