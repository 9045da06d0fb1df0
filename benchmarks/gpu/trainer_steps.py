"""Steps of the whole trainer that must not wait for the device: loss scaling, LARS, meters.

The run is longer than anything that the trainer looks at now and then: more steps than twice
``max_skipped_steps``, after which a device value was once read. Whether the host waits is told by
torch's detector, and by a step that must return while the device is still busy with earlier work.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import torch

from benchmarks.gpu import clock
from benchmarks.gpu.place import TRAINER, need
from benchmarks.gpu.report import Case, Skipped
from benchmarks.gpu.waiting import check_that_syncs_fail

_SKIPPED_STEPS = 6
#: Steps before the first one that must not wait: kernels are compiled, graphs captured.
_WARM, _WATCHED = 8, 2 * _SKIPPED_STEPS + 10

#: Precision and further settings.
CASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("bf16", ()),
    ("fp16", ()),
    ("fp16-master", ()),
    ("fp16-master", ("batch_size=32",)),
    ("fp16-master", ("optimizer.clip_grad_norm=1.0",)),
)


def cases(dry: bool = False) -> Iterator[Case]:
    """Yield the checks."""
    for precision, overrides in CASES[:1] if dry else CASES:
        more = f", {' '.join(overrides)}" if overrides else ""
        name = f"no host sync in {_WATCHED} steps of the trainer, {precision}{more}"
        yield Case(name, partial(never_waits, precision, overrides, dry), seconds=15)


def never_waits(
    precision: str, overrides: tuple[str, ...], dry: bool, device: torch.device
) -> None:
    """Train a small model by the recipe, and check every step after the first few.

    On a CPU the steps are taken and counted, and then the check is skipped.
    """
    need(*TRAINER)
    from largebatch.recipes.ranks import Job
    from largebatch.recipes.schema.load import load
    from largebatch.recipes.training.callbacks import Callback
    from largebatch.recipes.training.trainer import Trainer

    steps = 2 if dry else _WARM + _WATCHED
    with tempfile.TemporaryDirectory() as run_dir:
        keys = {
            "model.name": "test_resnet",
            "data.source": "synthetic",
            "data.path": "null",
            "data.image_size": 32,
            "data.classes": 10,
            "batch_size": 16,
            "micro_batch_size": 16,
            "precision": precision,
            "max_skipped_steps": _SKIPPED_STEPS,
            "log_every": 10 * steps,
            "evaluate_every": "null",
            "target_accuracy": "null",
            "checkpoint.every": "null",
            "run_dir": run_dir,
        }
        settings = [*(f"{key}={value}" for key, value in keys.items()), *overrides]

        class Watch(Callback):
            """Watches the time from one step's beginning to the next one's."""

            steps = 0
            busy: torch.cuda.Event | None = None
            waited = False

            def on_step_begin(self, step: int) -> None:
                self.steps = step
                if device.type != "cuda":
                    if step == steps:
                        raise SystemExit
                    return
                if self.busy is not None:
                    self.waited = self.busy.query()
                torch.cuda.set_sync_debug_mode("default")
                if step == steps:
                    raise SystemExit
                if step in (_WARM, steps - 1):
                    torch.cuda.synchronize(device)
                if step == steps - 1:
                    clock.sleep(0.5, device)
                    self.busy = torch.cuda.Event()
                    self.busy.record()
                if step >= _WARM:
                    torch.cuda.set_sync_debug_mode("error")

        if device.type == "cuda":
            check_that_syncs_fail(device)
        watch = Watch()
        try:
            job = Job(0, 1, 1, device)
            recipe = load("resnet50-b65536", settings)
            trainer = Trainer(recipe, job, quiet=True, callbacks=[watch])
            with suppress(SystemExit):  # ends the run before it logs and writes its report
                trainer.run()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    assert watch.steps == steps, f"{watch.steps} steps were taken instead of {steps}"
    assert not watch.waited, "the host waited until the device had finished its earlier work"
    if device.type != "cuda":
        raise Skipped("needs CUDA")
