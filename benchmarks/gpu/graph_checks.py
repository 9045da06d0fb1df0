"""The trainer's steps in CUDA graphs, and compiled, against its steps as usual.

Each check trains a small network with dropout twice for a dozen steps, over which the learning rate
rises and falls, and compares weights, statistics and momentum. The kernels are the deterministic
ones, so that only what a graph does differently can make the runs differ.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.place import TRAINER, need, need_cuda
from benchmarks.gpu.report import Case, Skipped
from benchmarks.gpu.waiting import does_not_wait

_STEPS = 12
#: Steps after those that are checked for waiting.
WATCHED = 3
#: Largest difference of two runs, as a share of the way that the weights went in them.
_MOST = 0.02

#: Title and settings. A global batch has 16 images; a step captured in three graphs has several
#: micro-batches.
CASES: dict[str, tuple[str, ...]] = {
    "bf16": ("precision=bf16",),
    "bf16, 4 micro-batches": ("precision=bf16", "micro_batch_size=4"),
    "fp32": ("precision=fp32",),
    "fp16": ("precision=fp16",),
    "fp16-master": ("precision=fp16-master",),
    "fp16-master, 4 micro-batches, clipped": (
        *("precision=fp16-master", "micro_batch_size=4", "optimizer.clip_grad_norm=0.5"),
    ),
    "mlperf-corrected": ("precision=bf16", "optimizer.dialect=mlperf-corrected"),
    "a stage with smaller images": (*("precision=bf16", "stages=[{from: 6, image_size: 24}]"),),
}
#: Steps in which the loss scale is raised until the gradients overflow, in FP16: at the capture,
#: which then waits for the next step, and later.
_SPIKES = (3, 8)
#: The same with torch.compile, which takes longer.
COMPILED: dict[str, tuple[str, ...]] = {
    "compile=default, cuda_graph=true": ("compile=default", "cuda_graph=true"),
    "compile=reduce-overhead": ("compile=reduce-overhead",),
    "compile=reduce-overhead, 4 micro-batches": ("compile=reduce-overhead", "micro_batch_size=4"),
}


def cases(dry: bool = False) -> Iterator[Case]:
    """Yield the checks, the quick ones first."""
    for title, settings in CASES.items():
        check = partial(captured_is_eager, settings)
        yield Case(f"captured steps of the trainer: {title}", check, seconds=10)
    for title, settings in [*CASES.items()][:5]:
        check = partial(never_waits, settings)
        yield Case(f"no host sync in replayed steps: {title}", check, seconds=10)
    if not dry:
        for title, settings in COMPILED.items():
            check = partial(compiled, settings)
            yield Case(f"compiled steps of the trainer: {title}", check, seconds=60)


def captured_is_eager(settings: tuple[str, ...], device: torch.device) -> None:
    """Check that steps are captured, and that the run ends as without graphs.

    Raises:
        Skipped: The device has no graphs.
        RecipeError: The steps cannot be captured.
    """
    _need_graphs(device)
    with _deterministic():
        start, expected, _ = _train(device, *settings, "cuda_graph=false")
        _, found, trainer = _train(device, *settings, "cuda_graph=true")
    assert trainer._take_step._graphs is not None, "no step has been replayed"
    _compare(start, expected, found, _MOST)


def compiled(settings: tuple[str, ...], device: torch.device) -> None:
    """Check that a compiled run ends close to where it ends without compilation, in FP32.

    Fused kernels sum in another order, so that it is not exactly there; in half precision they also
    round less often, and a few steps at a high rate may then end elsewhere.
    """
    _need_graphs(device)
    with _deterministic():
        same = ("model.args.drop_rate=0", "precision=fp32")
        plain = [s for s in settings if "compile" not in s and "cuda_graph" not in s]
        start, expected, _ = _train(device, *same, *plain)
        torch.compiler.reset()
        _, found, _ = _train(device, *same, *settings)
    _compare(start, expected, found, 0.1)


def never_waits(settings: tuple[str, ...], device: torch.device) -> None:
    """Check that a replayed step returns while the device is busy.

    Raises:
        Skipped: The device is no GPU.
    """
    need_cuda(device)
    step = replayed_step(settings, device)
    for _ in range(WATCHED):
        does_not_wait(step, device)


def replayed_step(settings: tuple[str, ...], device: torch.device) -> Callable[[], None]:
    """Return what takes the next step of a run whose steps are replayed by now.

    It can be called ``WATCHED`` times; none of these steps is one that reads the meters.
    """
    _, _, trainer = _train(device, *settings, "cuda_graph=true", "epochs=2")
    assert trainer._take_step._graphs is not None, "no step has been replayed"

    def step() -> None:
        trainer._update(trainer.batches, trainer.meter)
        trainer.step += 1

    return step


def _need_graphs(device: torch.device) -> None:
    need(*TRAINER)
    from largebatch.recipes.training.recorder import RECORDERS

    if device.type not in RECORDERS:
        raise Skipped("needs CUDA")


@contextmanager
def _deterministic() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


def _train(
    device: torch.device, *settings: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Train a few steps; return the state before and after, and the trainer.

    The trainer has the iterator of its batches and a meter as ``batches`` and ``meter``.
    """
    from largebatch.recipes.ranks import Job
    from largebatch.recipes.schema.load import load
    from largebatch.recipes.training.evaluate import Meter
    from largebatch.recipes.training.trainer import Trainer

    with tempfile.TemporaryDirectory() as run_dir:  # the trainer writes only in run()
        keys = {
            "model.name": "test_resnet",
            "model.args.drop_rate": 0.3,
            "data.source": "synthetic",
            "data.path": "null",
            "data.image_size": 32,
            "data.classes": 10,
            "data.train_images": 16 * _STEPS,
            "batch_size": 16,
            "micro_batch_size": 16,
            "epochs": 1,
            "precision": "bf16",
            "optimizer.lr": 2.0,
            "optimizer.trust_coefficient": 0.02,
            "schedule.warmup": "0.5dur",
            "log_every": 10 * _STEPS,  # a logged step waits, as it may
            "evaluate_every": "null",
            "target_accuracy": "null",
            "checkpoint.every": "null",
            "run_dir": run_dir,
        }
        overrides = [*(f"{key}={value}" for key, value in keys.items()), *settings]
        trainer: Any = Trainer(load("resnet50-b65536", overrides), Job(0, 1, 1, device), quiet=True)
    if device.type == "cpu":  # where LARS's own choice reads on the host whether to skip a step
        trainer.optimizer._implementation = "foreach"
    trainer.batches, trainer.meter = iter(trainer.loader), Meter(device)
    start = _state(trainer)
    for number in range(_STEPS):
        scale = trainer.precision._scaler._scaler._scale if trainer.precision.scales else None
        if scale is not None:
            scale.fill_(2.0**40 if number in _SPIKES else 1024.0)
        before = _state(trainer) if number in _SPIKES and scale is not None else {}
        trainer._update(trainer.batches, trainer.meter)
        trainer.step += 1
        for name, value in before.items():
            same = torch.equal(value, _state(trainer)[name])
            assert same, f"step {number} overflowed and changed {name}"
    return start, _state(trainer), trainer


def _state(trainer: Any) -> dict[str, Tensor]:
    state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for index, values in trainer.optimizer.state_dict()["state"].items():
        state |= {f"{name} of parameter {index}": value.clone() for name, value in values.items()}
    return state


def _compare(
    start: dict[str, Tensor], expected: dict[str, Tensor], found: dict[str, Tensor], most: float
) -> None:
    """Check the distance of two ends of a run in relation to the way from its start."""
    assert found.keys() == expected.keys()
    for kind in ("momentum", "running", "weight"):
        names = [name for name in expected if kind in name]
        ways = [expected[n].double() - start.get(n, torch.zeros_like(expected[n])) for n in names]
        gaps = [found[n].double() - expected[n].double() for n in names]
        way, gap = (float(torch.stack([t.norm() for t in ts]).norm()) for ts in (ways, gaps))
        assert way > 0, f"{kind}: nothing has changed in {_STEPS} steps"
        assert gap <= most * way, f"{kind}: {gap / way:.3g} of the way apart, at most {most:g}"
