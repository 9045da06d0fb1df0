"""Steps of the whole trainer on a small network: that they do not wait, and that compiled ones are
the eager ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu import clock
from benchmarks.gpu.place import TRAINER, need
from benchmarks.gpu.report import Case, Skipped

_MAX_SKIPPED = 6
#: Steps before the first one that must not wait, in which kernels are compiled, and those after it:
#: more than twice ``max_skipped_steps``, after which a device value was once read.
_WARM, _WATCHED = 20, 2 * _MAX_SKIPPED + 10

#: Precision and further settings of runs that must not wait, and precisions of compiled runs.
WAITING: tuple[tuple[str, ...], ...] = (
    ("bf16",),
    ("fp16",),
    ("fp16-master",),
    ("fp16-master", "micro_batch_size=8"),
    ("fp16-master", "optimizer.clip_grad_norm=1.0"),
)
COMPILED = ("bf16", "fp16", "fp16-master", "fp32")

#: Steps of a compiled run, and the distance of its end that is allowed beside that of rounding, and
#: at most: one micro-batch of two in place of the mean is 0.7 away.
_STEPS, _SLACK, _MOST = 2, 0.05, 0.5

State = dict[str, Tensor]


def waits(precision: str, *overrides: str) -> str:
    """Return the name of a check that steps do not wait."""
    return f"the trainer does not wait past step {_WARM}: {', '.join([precision, *overrides])}"


def compiles(precision: str) -> str:
    """Return the name of a check of compiled steps."""
    return f"a compiled step of the trainer is the eager one: {precision}, accumulated"


def cases(dry: bool) -> Iterator[Case]:
    """Yield the checks; those of BF16 in a dry run."""
    for settings in WAITING[:1] if dry else WAITING:
        yield Case(waits(*settings), partial(never_waits, settings), says_wrong=False)
    for precision in COMPILED[:1] if dry else COMPILED:
        yield Case(compiles(precision), partial(compiled_is_eager, precision))


def never_waits(settings: tuple[str, ...], device: torch.device) -> None:
    """Check every step after the first ones, by torch's detector; the last one must also return
    while the device is still busy with earlier work. On a CPU two steps are only taken."""
    on_gpu = device.type == "cuda"
    steps = _WARM + _WATCHED if on_gpu else 2
    busy: list[torch.cuda.Event] = []
    waited = False

    def watch(step: int, _: Any) -> None:
        nonlocal waited
        if not on_gpu:
            return
        torch.cuda.set_sync_debug_mode("default")
        waited = bool(busy) and busy[0].query()
        if step in (_WARM, steps - 1):
            torch.cuda.synchronize(device)
        if step == steps - 1:
            clock.sleep(0.5, device)
            busy.append(torch.cuda.Event())
            busy[0].record()
        if step == _WARM:
            _check_that_syncs_fail(device)
        if _WARM <= step < steps:
            torch.cuda.set_sync_debug_mode("error")

    try:
        precision, *more = settings
        train(device, steps, [f"precision={precision}", "compile=false", *more], watch)
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    assert not waited, "the host waited until the device had finished its earlier work"
    if not on_gpu:
        raise Skipped("needs CUDA")


def _check_that_syncs_fail(device: torch.device) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.ones((), device=device).item()
    except RuntimeError:
        return
    raise RuntimeError("torch did not detect a host sync, so this check is impossible here")


def compiled_is_eager(precision: str, device: torch.device) -> None:
    """Compare the changes by two steps of two micro-batches in each form.

    Fused kernels sum in another order and round less often in half precision, so that the ends are
    close and not equal. How far rounding alone moves them is seen in a third run, in FP32: compiled
    steps may be twice as far away. A micro-batch or a scale that is missing would move them by far
    more. On a CPU Inductor is left out, for it takes long.
    """
    stats, cudnn = torch._dynamo.utils.counters["stats"], torch.backends.cudnn
    settings = [f"precision={precision}", "micro_batch_size=8", "cudnn_benchmark=false"]
    settings += ["loss_scale=128"] * precision.startswith("fp16")  # at which no step overflows
    before, cudnn.deterministic = cudnn.deterministic, True
    try:
        with _without_inductor() if device.type == "cpu" else nullcontext():
            expected = train(device, _STEPS, [*settings, "compile=false"])
            torch.compiler.reset()
            stats.clear()
            found = train(device, _STEPS, [*settings, "compile=default"])
            if not stats["unique_graphs"]:
                raise RuntimeError("nothing was compiled")
            settings += ["precision=fp32", "loss_scale=none", "compile=false"]
            exact = train(device, _STEPS, settings)
    finally:
        cudnn.deterministic = before
    far, rounding = (distance(expected, other) for other in (found, exact))
    most = min(_MOST, 2 * rounding + _SLACK)
    assert far <= most, f"{far:.3g} of the way apart, rounding {rounding:.3g}"


@contextmanager
def _without_inductor() -> Iterator[None]:
    """Trace and differentiate as torch.compile does, without its code generation."""
    from torch._dynamo.backends.debugging import aot_eager

    with patch("torch._TorchCompileInductorWrapper.__call__", lambda self, *a: aot_eager(*a)):
        yield


def train(
    device: torch.device,
    steps: int,
    settings: list[str],
    watch: Callable[[int, Any], None] = lambda step, trainer: None,
) -> State:
    """Take a few steps; return by how much they change buffers, weights and momentum.

    ``watch`` is told each step before it is taken, and ``steps`` after the last one.
    """
    need(*TRAINER)
    from largebatch.recipes.ranks import Job
    from largebatch.recipes.schema.load import load
    from largebatch.recipes.training.callbacks import Callback
    from largebatch.recipes.training.trainer import Trainer

    class Watch(Callback):
        def on_step_begin(self, step: int) -> None:
            watch(step, trainer)
            if step == steps:
                raise SystemExit

    with tempfile.TemporaryDirectory() as run_dir:
        keys = {
            "model.name": "test_resnet",
            "data.source": "synthetic",
            "data.path": "null",
            "data.image_size": 32,
            "data.classes": 10,
            "batch_size": 16,
            "micro_batch_size": 16,
            "optimizer.lr": 0.1,
            "schedule.warmup": 0,
            "max_skipped_steps": _MAX_SKIPPED,
            "log_every": 10 * steps,
            "evaluate_every": "null",
            "target_accuracy": "null",
            "checkpoint.every": "null",
            "run_dir": run_dir,
        }
        recipe = load("resnet50-b65536", [*(f"{k}={v}" for k, v in keys.items()), *settings])
        trainer: Any = Trainer.of(recipe, Job(0, 1, 1, device), quiet=True, callbacks=[Watch()])
        start = _state(trainer)
        try:
            trainer.run()
        except SystemExit:  # ends the run before it logs and writes its report
            return {name: value - start.get(name, 0) for name, value in _state(trainer).items()}
    raise AssertionError(f"the run ended before step {steps}")


def _state(trainer: Any) -> State:
    """Return copies in FP64; weights are those of masters if there are."""
    state = dict(trainer.model.named_buffers())
    for name, parameter in trainer.model.named_parameters():
        of = trainer.optimizer.state.get(parameter, {})
        state[name] = of.get("master", parameter)
        state |= {f"{name} {key}": value for key, value in of.items() if key != "master"}
    return {name: value.detach().double().clone() for name, value in state.items()}


def distance(one: State, other: State) -> float:
    """Return how far two changes are apart over the first: root mean square over tensors."""
    shares = [(other[name] - value).norm() / value.norm() for name, value in one.items()]
    return float(
        torch.stack([share for share in shares if share.isfinite()]).square().mean().sqrt()
    )
