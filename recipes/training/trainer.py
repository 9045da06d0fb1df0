"""The trainer: runs a recipe step by step.

All random numbers are a function of (seed, step, rank), and the order of the images is a function
of (seed, epoch). So a run that is stopped at any step and resumed makes the same updates, provided
that the device's kernels are deterministic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from ...amp import GradientOverflowError
from ...comm import Topology, ranged
from ...lars import Span, TrustRatioHistory, as_scheduler
from ...pipeline import Batch, Loader
from ..errors import StorageError, TrainingError
from ..models.batch_norm import share_statistics
from ..models.optimizers import settle_on_device, share_work
from ..ranks import Job, lost_ranks_named
from ..schema.load import Loaded, differences
from . import build, checkpoint, closed_output
from .banner import show_opening
from .callback_list import CallbackList, callbacks_of
from .callbacks import Callback, Metrics, RunContext, Status
from .compilation import settle
from .console import Display
from .ddp import data_parallel, lay_out_buckets
from .divergence import divergence, is_finite
from .ema import WeightAverage
from .ending_table import Ending
from .evaluate import Meter, average_buffers, averaged_buffers, evaluate
from .gradient_noise import NoiseMeter
from .memory_estimate import MemoryEstimate
from .phases import AVERAGE
from .readings import Readings
from .results import write_recipe, write_results
from .run_dir import check_shared, is_of, run_place
from .saving import Saving, newest_in, newest_of
from .signals import noted
from .skipped_images import SkippedImages
from .step import TrainingStep
from .stopping import Stopping


class Trainer:
    """Trains a recipe on the ranks of a job.

    Args:
        loaded: The recipe.
        job: The ranks. Each makes a trainer and calls :meth:`run`.
        quiet: Whether to show nothing but warnings.
        warns: Whether to show warnings.
        callbacks: Callbacks to call after those of the recipe.
        results: Whether to write weights, report and summary at the end of the run.
        began_seconds: How long ago the run began to start, such as when its process did.

    Raises:
        RecipeError: The recipe does not fit the data, the machine or the run folder. Raised on all
            ranks, before anything is written.
    """

    def __init__(
        self,
        loaded: Loaded,
        job: Job,
        *,
        quiet: bool = False,
        warns: bool = True,
        callbacks: Iterable[Callback] = (),
        results: bool = True,
        began_seconds: float = 0.0,
    ) -> None:
        self._ending = Ending(began_seconds)
        self.name, self.recipe, self.job = loaded.name, loaded.recipe, job
        self.notices, self._writes_results = loaded.notices, results
        with job.raise_on_all_ranks():
            place = run_place(loaded, job.from_main(time.strftime("%Y-%m-%d_%H-%M-%S")))
            newest = newest_of(place.folder)
            further = [(type(callback).__qualname__, callback) for callback in callbacks]
            every = [*callbacks_of(loaded.recipe), *further, ("clock", self._ending.clock)]
            self.callbacks = CallbackList(every, job)
            self.callbacks.check(loaded.recipe, place.folder)
            components = build.prepare(loaded, job, place)
        job.check_alike(components.facts(loaded.recipe))
        recipe, saved = self.recipe, components.saved
        self.run_dir = components.run_dir
        self.loader, self.val_loader = components.loader, components.val_loader
        self.timeline, self.last_step = components.timeline, components.last_step
        self.total_steps = components.timeline.total_steps
        self.schedule = components.schedule
        self.settings = components.settings
        shows = job.is_main and not quiet
        memory = MemoryEstimate(recipe, components, job) if shows else None
        self.model = components.model.to(job.device)
        if self.settings.channels_last:  # convolutions then also return this memory format
            self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = components.optimizer

        self.step: int = saved.get("step", 0)
        if saved and recipe.precision == "auto":
            self.precision = build.named_precision(recipe, saved["precision"]["name"], job)
        else:
            with self.settings.applied():
                self.precision = build.build_precision(recipe, job, self.model, self.loader)
        share_statistics(self.model, recipe, job)  # after `auto`, which tries a copy of the model
        self.model = self.precision.convert(self.model)
        self.notices += settle_on_device(self.optimizer, job)
        timeout = timedelta(seconds=recipe.comm.timeout_seconds)
        topology = Topology.from_environment(recipe.comm.ranks_per_node, timeout=timeout)
        with job.raise_on_all_ranks():
            plan = build.build_plan(recipe, topology)
            plan.check(topology)
        components = replace(components, plan=plan)
        share_work(recipe, self.optimizer, topology)
        self.ddp = data_parallel(self.model, job, plan, topology) if job.world_size > 1 else None
        kept = saved.get("recipe", {}).get("compile")
        parts = (self.timeline, self.model, self.precision, self.loader, job)
        with self.settings.applied():
            compiled, uncompiled = settle(recipe.compile, kept, *parts)
        self.recipe = recipe = recipe.model_copy(update={"compile": compiled})
        self.noise = NoiseMeter.of(recipe, self.model, self.precision, self.timeline)
        self._take_step = TrainingStep.of(
            recipe, self.model, self.ddp, self.optimizer, self.precision, self.noise
        )
        if self.ddp:
            with self.settings.applied():
                lay_out_buckets(self.ddp, self._take_step, self.loader)
        self.ema = WeightAverage.of(recipe.ema, self.model, self.optimizer)
        resumed_from = components.resume_from
        if resumed_from:  # after DDP, which starts by copying rank 0's buffers to all ranks
            checkpoint.load(resumed_from, self.model, self.optimizer, job, self.ema)
            self.precision.load_state_dict(saved["precision"]["state"])
            self.callbacks.load_state_dict(saved["callbacks"])
        self.scheduler = as_scheduler(self.optimizer, self.schedule, steps_done=self.step)
        lars: Any = self.optimizer
        self.trust_ratios = TrustRatioHistory(lars) if recipe.trust_ratios_every else None
        loaders = {"train": self.loader, "val": self.val_loader}
        self.skipped = SkippedImages(self.run_dir, job, loaders)
        self.display = Display.of(
            recipe, job, self.timeline, self.val_loader, self.step, quiet=quiet, warns=warns
        )
        self._saving = Saving(self.run_dir, job, recipe, newest, saved, self.display.warn)
        self._stopping = Stopping(job, self.display.warn)
        self.context = RunContext(
            name=self.name,
            recipe=recipe,
            job=job,
            run_dir=self.run_dir,
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
            val_loader=self.val_loader,
            timeline=self.timeline,
            step=self.step,
            last_step=self.last_step,
            continues=resumed_from is not None and is_of(resumed_from, self.run_dir),
            say=self.display.say,
            warn=self.display.warn,
            stop=self._stopping.ask,
            untimed=self._untimed,
        )
        measured = (self.skipped, self.noise, saved.get("readings"))
        self._readings = Readings(self.context, self.schedule, self._take_step, topology, *measured)
        self._good_step = self.step + 1  # losses are known to be finite before this step
        self._reached: float | None = saved.get("reached")  # top-1 at or above the target

        changed = differences(saved["recipe"], self._resolved()) if saved else []
        for line in (*place.damaged, *filter(None, [components.left_out, uncompiled])):
            self.display.warn(line)
        show_opening(
            self.context, components, self.precision, topology, memory, self.notices, changed
        )

    def run(self) -> dict[str, Any]:
        """Train, evaluate, and write the run folder.

        Returns:
            The summary, as in ``summary.json``; empty on all ranks but rank 0, where a callback
            stopped the run, and without ``results``.

        Raises:
            SystemExit: After one of :data:`.signals.STOPPING`, once a checkpoint is written.
            TrainingError: The loss or the weights are no longer finite, or too many consecutive
                steps were skipped. Raised on all ranks; the checkpoints are from before.
            CallbackError: A callback failed.
        """
        check_shared(self.run_dir, self.job)
        stopping = self._stopping
        locked = self._saving.locked(
            self.step,
            lambda: stopping.reason if stopping.by_callback else None,
            lambda: self._ending.facts,
        )
        with self.job.main_ends_first(), locked:
            return self._run()

    def _run(self) -> dict[str, Any]:
        status: Status = "failed"
        summary: dict[str, Any] = {}
        try:
            with self.job.raise_on_all_ranks():
                self._start()
            with self.settings.applied():
                self._train()
            self.display.stop()
            if self._stopping:
                status = "stopped"
            else:
                summary = self._finish()
                status = "finished"
        except TrainingError as error:
            status = "failed" if isinstance(error, StorageError) else "diverged"
            raise
        finally:
            self.display.stop()
            self.callbacks.end(status, summary)
            why = self._stopping.signal, self._stopping.reason
            self._ending.early(self.context, status, self.step, *why)
        if self._stopping.signal:
            raise SystemExit(128 + self._stopping.signal)
        return summary

    @property
    def signal(self) -> int:
        """Number of the last signal to stop that came while this rank trained; 0: none."""
        return self._stopping.received

    def _start(self) -> None:
        """Begin to write the run folder, and start the callbacks."""
        if self.job.is_main:
            write_recipe(self.run_dir, self.name, self.recipe, self.notices)
        closed_output.follow(self.run_dir)
        self.callbacks.start(self.context)

    def _train(self) -> None:
        """Train up to the last step, the target accuracy or a signal."""
        recipe = self.recipe
        readings, batches, stopping = self._readings, iter(self.loader), self._stopping
        reached = recipe.reached(self._reached)
        self.display.start(self.step, self.run_dir)
        readings.restart()
        with noted(stopping.note), lost_ranks_named(lambda: newest_in(self.run_dir)):
            while self.step < self.last_step and not (reached or stopping):
                self.callbacks.step_begin(self.step)
                self._update(batches, readings.meter)
                if stopping:
                    break
                readings.step_end()
                self.step += 1
                if self.ema and self._due(recipe.ema.every):
                    with ranged(AVERAGE):
                        self.ema.update()
                self.callbacks.step_end(self.step)
                self.display.advance()
                last = self.step == self.last_step
                if last or self._due(recipe.log_every):
                    self._log_training()
                with readings.paused():
                    if self.val_loader and (last or self._due(recipe.evaluate_every)):
                        reached = self._evaluate(self.val_loader)
                        if recipe.checkpoint.keep_best and self._saving.is_best(self.step):
                            self._save()
                if self.trust_ratios and (last or self._due(recipe.trust_ratios_every)):
                    ratios = self.trust_ratios.read()
                    self.callbacks.histograms("trust_ratio", self.step, self.loader.epoch, ratios)
                ends = last or reached
                if not ends:
                    stopping.after_step()
                if reached:
                    self._log_training()
                with readings.paused():
                    if ends or (self._due(recipe.checkpoint.every) and not stopping):
                        self._save(ends=ends)
            if stopping.by_callback:
                self._log_training()
            if stopping.signal:
                self._save(ends=True)
            stopping.end()

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        """Leave the body out of the time of training."""
        with self._readings.paused(), self._ending.clock.left_out():
            yield

    def _update(self, batches: Iterator[Batch], meter: Meter) -> None:
        """One optimizer step on one global batch."""
        # Dropout and the like, as a function of seed, step and rank.
        place = (self.recipe.seed * 1_000_003 + self.step) * 1_000_003 + self.job.rank
        torch.manual_seed(place % 2**63)
        step = self.step + 1
        reads = self._may_read(step)
        meter.begin_step(measures_accuracy=reads, may_drop=self._stopping.drops_steps)
        if self.noise:
            self.noise.begin_step(step, self.loader.micro_batch_size)
        try:
            is_made = self._take_step(
                batches,
                self.loader.accumulation,
                meter,
                waits=reads,
                stops=self._stopping.in_step,
            )
        except GradientOverflowError as error:  # on all ranks: they have the same gradients
            raise self._diverged(str(error), step) from error
        if not is_made:  # the loader goes back to where the step began
            start = {"position": self.timeline.position(self.step)}
            self.loader.load_state_dict({**self.loader.state_dict(), **start})
            return
        if self.trust_ratios:
            self.trust_ratios.record()
        self.scheduler.step()

    def _may_read(self, step: int) -> bool:
        """Whether the meters may be read after ``step``, as far as that is known beforehand."""
        recipe = self.recipe
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
        start = time.perf_counter()
        self.callbacks.evaluation_begin(self.step)
        # Averaged for the evaluation only: training continues as if it had not been evaluated.
        with averaged_buffers(self.model, self.job):
            values = evaluate(self.model, loader, self.precision, self.job)
        self.callbacks.evaluation_end(self.step, values)
        if self.ema:
            values |= self.ema.evaluate(loader, self.precision, self.job)
        values["seconds"] = time.perf_counter() - start
        self._log("val", values)
        reached = self.recipe.reached(values["top1"])
        self._reached = values["top1"] if reached else None
        self._saving.evaluated(self.step, values["top1"])
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
        start = time.perf_counter()
        # The last update may have broken weights although its loss was finite.
        if not is_finite(self.model, self.job):
            raise self._diverged("weights or batch statistics are not finite", self.step)
        state = {
            "loader": self.loader.state_dict(),
            "precision": {"name": self.precision.name, "state": self.precision.state_dict()},
            "recipe": self._resolved(),
            "reached": self._reached,
            "callbacks": self.callbacks.state_dict(),
            "readings": self._readings.state_dict(),
        }
        path = self._saving.save(self.step, self.model, self.optimizer, state, self.ema, ends=ends)
        if path:
            self.display.saved(self.step, time.perf_counter() - start)
            self.callbacks.checkpoint(self.step, path)

    def _diverged(self, what: str, step: int) -> TrainingError:
        return divergence(self.context, what, step, self.schedule(step - 1), self._good_step)

    def _finish(self) -> dict[str, Any]:
        """Write weights, report and summary; collective, and returns the summary on rank 0."""
        average = self.ema.state_dict(self.job) if self.ema else None
        average_buffers(self.model, self.job)
        self.skipped.show(self.display.warn)
        if not (self.job.is_main and self._writes_results):
            return {}
        ending, skipped = self._ending, self.skipped.count
        return write_results(self.context, self.precision, average, skipped, ending)

    def _resolved(self) -> dict[str, Any]:
        """The recipe with every key, as JSON can hold it."""
        return self.recipe.model_dump(mode="json", by_alias=True)
