"""The curves of a run, and the charts that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .lines import Line, number
from .run import Run
from .shares import ABSENT, TITLES, is_recorded


@dataclass(frozen=True)
class Curve:
    """One curve of one run.

    Attributes:
        chart: Key of its chart.
        label: What it is of: a split, or a part of the time.
        steps: Steps, ascending.
        values: Value at each step; None where it is not finite.
    """

    chart: str
    label: str
    steps: list[int]
    values: list[float | None]


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        key: Its name, unique on a page.
        title: Heading.
        unit: Unit of the values; empty for a plain number.
    """

    key: str
    title: str
    unit: str = ""


TRAINING, VALIDATION, AVERAGE = "training", "validation", "validation, EMA of weights"

#: The curves that are values of the lines: chart, split, key and label.
_VALUES = (
    (Chart("loss", "Loss"), "train", "loss", TRAINING),
    (Chart("loss", "Loss"), "val", "loss", VALIDATION),
    (Chart("loss", "Loss"), "val", "ema_loss", AVERAGE),
    (Chart("top1", "Top-1 accuracy", "%"), "train", "top1", TRAINING),
    (Chart("top1", "Top-1 accuracy", "%"), "val", "top1", VALIDATION),
    (Chart("top1", "Top-1 accuracy", "%"), "val", "ema_top1", AVERAGE),
    (Chart("lr", "Learning rate"), "train", "lr", TRAINING),
    (Chart("batch_size", "Global batch size", "images"), "train", "batch_size", TRAINING),
    (Chart("gradient_norm", "Gradient norm before clipping"), "train", "gradient_norm", TRAINING),
    (Chart("noise_scale", "Gradient noise scale", "images"), "train", "noise_scale", TRAINING),
    (Chart("loss_scale", "Loss scale"), "train", "loss_scale", TRAINING),
    (Chart("skipped_steps", "Steps skipped so far"), "train", "skipped_steps", TRAINING),
    (Chart("throughput", "Throughput", "images/s"), "train", "images_per_second", TRAINING),
    (Chart("memory", "Memory", "GB"), "train", "memory_bytes", TRAINING),
    (Chart("gpu_utilisation", "GPU utilisation", "%"), "train", "gpu_utilisation", TRAINING),
    (Chart("gpu_power", "GPU power", "W"), "train", "gpu_power_watts", TRAINING),
)
#: What a value of a key is divided by for the unit of its chart.
_UNITS = {"memory_bytes": 1e9}

#: Parts of a step's time: key of their seconds, and label. Any other key of seconds is one as well.
SLOWEST_WAIT = f"{TITLES['input_seconds']}, slowest rank"
ALL_REDUCE_WAIT = "waiting for the all-reduce"
_PARTS = {
    **TITLES,
    "wait_seconds": TITLES["input_seconds"],  # of runs that do not divide their steps
    "all_reduce_wait_seconds": ALL_REDUCE_WAIT,
}
_ORDER = {key: place for place, key in enumerate(_PARTS)}
_TIME = Chart("time", "Share of training time", "%")

#: Keys of the lines of training that are no curve of their own.
_NO_CURVE = {
    *("split", "step", "epoch", "seconds", "top5", "noise_scale_error", "step_wait_seconds"),
    *("least_all_reduce_wait_seconds", "slowest_rank", "slowest_rank_seconds"),
}
_KNOWN = {key for _, split, key, _ in _VALUES if split == "train"} | _NO_CURVE


def curves(run: Run) -> list[Curve]:
    """Return the curves of a run, in the order of :func:`charts`."""
    lines = {"train": run.train, "val": run.val}
    found = []
    for chart, split, key, label in _VALUES:
        curve = _scheduled(run) if key == "lr" else None
        curve = curve or _of_key(lines[split], key, chart.key, label)
        if curve:
            found.append(curve)
    found += _shares(run.train)
    for key in _further(run.train):
        curve = _of_key(run.train, key, key, TRAINING)
        if curve:
            found.append(curve)
    return found


def charts(found: Sequence[Curve]) -> list[Chart]:
    """Return the charts that curves belong to, in a fixed order, those of unknown keys last."""
    known = {chart.key: chart for chart in (*(entry[0] for entry in _VALUES), _TIME)}
    keys = {curve.chart for curve in found}
    further = sorted(key for key in keys if key not in known)
    return [
        *(chart for key, chart in known.items() if key in keys),
        *(Chart(key, key) for key in further),
    ]


def _of_key(lines: Sequence[Line], key: str, chart: str, label: str) -> Curve | None:
    having = [line for line in lines if key in line]
    if not having:
        return None
    unit = _UNITS.get(key, 1)
    numbers = [number(line[key]) for line in having]
    values = numbers if unit == 1 else [None if n is None else n / unit for n in numbers]
    return Curve(chart, label, [line["step"] for line in having], values)


def _scheduled(run: Run) -> Curve | None:
    """The learning rate of each step, from the schedule itself; None where that is not known."""
    schedule, steps = run.schedule, list(range(run.step))
    if schedule is None or not steps:
        return None
    return Curve("lr", TRAINING, steps, [schedule(step) for step in steps])


def _shares(lines: Sequence[Line]) -> Iterator[Curve]:
    """What share of the time between two readings went where, in percent."""
    keys = {key for line in lines for key in line if _is_part(key)}
    if all("input_seconds" in line for line in lines):
        keys.discard("wait_seconds")
    # Beside the wait of rank 0, which only a part of the readings has, that of the slowest rank.
    labels = _PARTS | ({"wait_seconds": SLOWEST_WAIT} if "input_seconds" in keys else {})
    for key in sorted(keys, key=lambda key: (_ORDER.get(key, len(_ORDER)), key)):
        having = [line for line in lines if key in line and number(line.get("seconds"))]
        label = labels.get(key, key.removesuffix("_seconds").replace("_", " "))
        values = [number(line[key]) for line in having]
        shares = [
            None if value is None else round(100 * value / line["seconds"], 4)
            for value, line in zip(values, having, strict=True)
        ]
        if having:
            yield Curve(_TIME.key, label, [line["step"] for line in having], shares)


def _is_part(key: str) -> bool:
    return key.endswith("_seconds") and key not in _NO_CURVE


def _further(lines: Sequence[Line]) -> list[str]:
    """Keys of numbers that this module does not know, such as of a later version."""
    keys = dict.fromkeys(key for line in lines for key, v in line.items() if number(v) is not None)
    return [key for key in keys if key not in _KNOWN and not _is_part(key)]


def not_recorded(runs: Sequence[Run]) -> list[str]:
    """Return what a report could show and none of the runs recorded, with what would record it."""
    having = {curve.chart for run in runs for curve in curves(run)}
    evaluated = any(run.val for run in runs)
    ratios = any(run.trust_ratios for run in runs)
    on_gpu = any(str(run.summary.get("device", "")).startswith("cuda") for run in runs)
    missing = {
        "accuracy and loss on the validation images (evaluate_every)": evaluated,
        "gradient norm (optimizer.clip_grad_norm, which also clips)": "gradient_norm" in having,
        "loss scale (an FP16 precision)": "loss_scale" in having,
        "gradient noise scale (gradient_noise_every)": "noise_scale" in having,
        "trust ratios (trust_ratios_every, for optimizers that have them)": ratios,
        f"time of forward pass, backward pass and optimizer. {ABSENT}": any(map(is_recorded, runs)),
        "memory, which older runs do not record": any("memory" in key for key in having),
        "utilisation and power of the GPU (the package nvidia-ml-py)": not on_gpu
        or bool(having & {"gpu_utilisation", "gpu_power"}),
    }
    return [what for what, there in missing.items() if not there]
