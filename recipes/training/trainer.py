"""The trainer: runs a recipe step by step.

All random numbers are a function of (seed, step, rank), and the order of the images is a function
of (seed, epoch). So a run that is stopped at any step and resumed makes the same updates, provided
that the device's kernels are deterministic.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from typing import Any

import torch

from ...amp import GradientOverflowError
from ...comm import ranged
from ...lars import Span
from ...pipeline import Batch, Loader
from ..errors import TrainingError
from ..ranks import Job, lost_ranks_named
from ..schema.load import Loaded, override
from .callbacks import Metrics
from .evaluate import Meter, average_buffers, averaged_buffers, evaluate
from .folder.checkpoint import latest
from .folder.ending import ending_of
from .folder.names import CHECKPOINTS
from .folder.place import check_shared
from .folder.saving import said_newest
from .process import noted
from .run import Run, start_up
from .screen.closing import end_early, write_recipe, write_results
from .watch.clocks import AVERAGE


class Trainer:
    """Trains a run on the ranks of its job: each rank makes a trainer, and calls :meth:`run`."""

    def __init__(self, run: Run) -> None:
        self.context, self.callbacks = run.context, run.callbacks
        self.job, self.run_dir = run.context.job, run.context.run_dir
        self.model, self.optimizer = run.context.model, run.context.optimizer
        self.loader, self.val_loader = run.context.loader, run.context.val_loader
        self.timeline, self.last_step = run.context.timeline, run.context.last_step
        self.step = run.context.step
        self.precision, self.scheduler, self.ema = run.precision, run.scheduler, run.ema
        self._built, self._take_step = run, run.take_step
        self._readings, self._stopping = run.readings, run.stopping
        self._checkpoints = run.checkpoints
        self.display, self._clock = run.display, run.clock
        self._ended: dict[str, Any] = {}  # what is known of a run that has not finished
        self._reached = run.reached  # top-1 at or above the target
        self._good_step = self.step + 1  # losses are known to be finite before this step

    @classmethod
    def of(cls, loaded: Loaded, job: Job, **options: Any) -> Trainer:
        """Return the trainer of a recipe; the options are those of :func:`.run.start_up`."""
        return cls(start_up(loaded, job, **options))

    def run(self) -> dict[str, Any]:
        """Train, evaluate, and write the run folder."""
        check_shared(self.run_dir, self.job)
        locked = self._checkpoints.locked(
            self.step, lambda: self._stopping.asked, lambda: self._ended
        )
        with self.job.main_ends_first(), locked:
            return self._run()

    def _run(self) -> dict[str, Any]:
        stopping, summary = self._stopping, dict[str, Any]()
        try:
            with self.job.raise_on_all_ranks():
                self._start()
            self._train()
            self.display.stop()
            self._clock.begin("rest")
            if stopping.signal:
                raise SystemExit(128 + stopping.signal)
            if not stopping:
                summary = self._finish()
            status, _ = ending_of(None, stopping.asked)
        except BaseException as error:
            status, _ = ending_of(error)
            raise
        finally:
            self.display.stop()
            self._clock.begin("rest")
            self.callbacks.end(status, summary)
            if stopping or status == "diverged":
                why = stopping.signal, stopping.reason
                self._ended = end_early(self.context, self._clock, status, self.step, *why)
        return summary

    @property
    def signal(self) -> int:
        """Number of the last signal to stop that came while this rank trained; 0: none."""
        return self._stopping.received

    def _start(self) -> None:
        """Begin to write the run folder, and start the callbacks."""
        if self.job.is_main:
            write_recipe(self.context, self._built.notices)
        self.callbacks.start(self.context)

    def _train(self) -> None:
        """Train up to the last step, the target accuracy or a signal."""
        recipe, ratios = self.context.recipe, self._built.trust_ratios
        readings, batches, stopping = self._readings, iter(self.loader), self._stopping
        reached = recipe.reached(self._reached)
        self.display.start(self.context)
        self._clock.begin("training")
        readings.restart()
        with noted(stopping.note), lost_ranks_named(lambda: said_newest(self.run_dir)):
            while self.step < self.last_step and not (reached or stopping):
                self.callbacks.step_begin(self.step)
                self._update(batches, readings.meter)
                readings.step_end()
                self.step += 1
                if self.ema:
                    with ranged(AVERAGE):
                        self.ema.update()
                self.callbacks.step_end(self.step)
                self.display.advance()
                last = self.step == self.last_step
                if last or self._due(recipe.log_every):
                    self._log_training()
                with self._clock.during("rest"):
                    if self.val_loader and (last or self._due(recipe.evaluate_every)):
                        reached = self._evaluate(self.val_loader)
                        if recipe.checkpoint.keep_best and self._checkpoints.is_best(self.step):
                            self._save()
                if ratios and (last or self._due(recipe.trust_ratios_every)):
                    epoch, values = self.loader.epoch, ratios.read()
                    self.callbacks.histograms("trust_ratio", self.step, epoch, values)
                ends = last or reached
                if not ends:
                    stopping.after_step()
                if reached:
                    self._log_training()
                if ends or (self._due(recipe.checkpoint.every) and not stopping):
                    self._save(ends=ends)
            if stopping.by_callback:
                self._log_training()
            if stopping.signal:
                self._save(ends=True)
            stopping.end()

    def _update(self, batches: Iterator[Batch], meter: Meter) -> None:
        """One optimizer step on one global batch."""
        # Dropout and the like, as a function of seed, step and rank.
        place = (self.context.recipe.seed * 1_000_003 + self.step) * 1_000_003 + self.job.rank
        torch.manual_seed(place % 2**63)
        step = self.step + 1
        reads = self._may_read(step)
        meter.begin_step(measures_accuracy=reads)
        if noise := self._built.noise:
            noise.watch(self._due(self.context.recipe.gradient_noise_every, step))
            noise.batch_size = self.loader.micro_batch_size
        try:
            self._take_step(batches, self.loader.accumulation, meter, waits=reads)
        except GradientOverflowError as error:  # on all ranks: they have the same gradients
            raise self._diverged(str(error), step) from error
        if self._built.trust_ratios:
            self._built.trust_ratios.record()
        self.scheduler.step()

    def _may_read(self, step: int) -> bool:
        """Whether the meters may be read after ``step``, as far as that is known beforehand."""
        recipe = self.context.recipe
        may_reach = recipe.target_accuracy is not None and self._due(recipe.evaluate_every, step)
        return may_reach or step == self.last_step or self._due(recipe.log_every, step)

    def _log_training(self) -> None:
        """Read the meters, which waits for the device, and log them, if a step was made since."""
        if not self._readings.steps:
            return
        values, waits = self._readings.read(self.step)
        self._log("train", values, step_wait_seconds=waits)
        if not math.isfinite(values["loss"]):
            raise self._diverged(f"the loss is {values['loss']}", self.step)
        self._readings.restart()
        self._good_step = self.step

    def _evaluate(self, loader: Loader) -> bool:
        """Evaluate and log; whether the target accuracy is reached."""
        with self._clock.during("evaluation"):
            self.callbacks.evaluation_begin(self.step)
            # Averaged for the evaluation only: training continues as if it had not been evaluated.
            with averaged_buffers(self.model, self.job):
                values = evaluate(self.model, loader, self.precision, self.job)
            self.callbacks.evaluation_end(self.step, dict(values))
            if self.ema:
                values |= self.ema.evaluate(loader, self.precision, self.job)
        values["seconds"] = self._clock.lasted["evaluation"]
        self._log("val", values)
        reached = self.context.recipe.reached(values["top1"])
        self._reached = values["top1"] if reached else None
        self._checkpoints.evaluated(self.step, values["top1"])
        return reached

    def _log(self, split: str, values: dict[str, float], **per_step: list[float]) -> None:
        epoch = self.loader.epoch
        self.callbacks.log(Metrics(split, self.step, epoch, values, per_step))
        self.display.metrics(split, self.step, epoch, values, self._readings.stragglers.slow)

    def _due(self, every: Span | None, step: int | None = None) -> bool:
        """Whether ``step`` (default: the last one) is the first at or past a multiple."""
        return every is not None and self.timeline.due(every, self.step if step is None else step)

    def _save(self, *, ends: bool = False) -> None:
        """Write a checkpoint, if the weights are finite; it has to succeed where the run ends."""
        with self._clock.during("checkpoints"):
            # The last update may have broken weights although its loss was finite.
            if not self._is_finite():
                raise self._diverged("weights or batch statistics are not finite", self.step)
            state = {
                "loader": self.loader.state_dict(),
                "precision": {"name": self.precision.name, "state": self.precision.state_dict()},
                "recipe": self.context.recipe.model_dump(mode="json", by_alias=True),
                "reached": self._reached,
                "callbacks": self.callbacks.state_dict(),
                "readings": self._readings.state_dict(),
            }
            objects = self.model, self.optimizer, state, self.ema
            if path := self._checkpoints.save(self.step, *objects, ends=ends):
                self.callbacks.checkpoint(self.step, path)

    def _is_finite(self) -> bool:
        """Whether weights and buffers are finite on all ranks; a collective, and a host sync."""
        values = self.model.state_dict().values()
        finite = all(bool(torch.isfinite(value).all()) for value in values)
        return not self.job.all_reduce_max(float(not finite))[0]

    def _diverged(self, what: str, step: int) -> TrainingError:
        """The error of a run of which ``what`` was found at ``step``."""
        # A loss is that of the weights before its step, so checkpoints before a good one are good.
        good = latest(self.run_dir / CHECKPOINTS, before=self._good_step)
        place = f"at step {step:,} of {self.timeline.total_steps:,}"
        problem = f"{what} {place}, learning rate {self._built.schedule(step - 1):.4g}"
        advice = "lower optimizer.lr or lengthen schedule.warmup"
        saved = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
        resume = shlex.quote(override("resume", str(good)))
        then = f", and continue from there with {resume}" if good else ""
        error = TrainingError(f"training diverged: {problem}", f"{saved}; {advice}{then}")
        error.problem = problem  # the status says the rest
        return error

    def _finish(self) -> dict[str, Any]:
        """Write weights, report and summary; collective, and returns the summary on rank 0."""
        average = self.ema.state_dict(self.job) if self.ema else None
        average_buffers(self.model, self.job)
        self._built.skipped.show(self.display.warn)
        if not (self.job.is_main and self._built.writes_results):
            return {}
        skipped = self._built.skipped.count
        return write_results(self.context, self.precision, average, skipped, self._clock)
