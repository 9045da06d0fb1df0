"""The trainer: a recipe through all rooms, step by step.

Everything random is a function of (seed, step, rank), and the order of the input one of
(seed, epoch), so a run that is stopped at any step and resumed makes the same updates, where the
device's kernels are deterministic.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...amp import GradientOverflowError, full_precision_state_dict
from ...comm import Topology
from ...lars import LARS, Span, TrustRatioHistory, as_scheduler
from ...pipeline import Batch
from ..errors import TrainingError
from ..mlperf.log import MLPerfLog
from ..models.batch_norm import share_statistics, statistics_images
from ..ranks import Job
from ..schema.load import RECIPE, Loaded, differences, dump
from . import build, checkpoint
from .banner import banner
from .checkpoint import Checkpoints
from .console import Display
from .ddp import data_parallel, lay_out_buckets
from .ema import WeightAverage
from .evaluate import Meter, average_buffers, averaged_buffers, evaluate
from .input_advice import input_advice
from .interval import Interval
from .metrics import MetricsLog
from .report import write_report
from .run_dir import check_shared, writing
from .signals import noted
from .skipped_images import SkippedImages
from .summary import summarise, write_summary
from .weights import WEIGHTS, WEIGHTS_EMA, write_weights


class Trainer:
    """Trains what a recipe says, on the ranks of a job.

    Args:
        loaded: the recipe.
        job: the ranks; each makes a trainer and calls :meth:`run`.
        quiet: whether to show nothing.

    Raises:
        RecipeError: the recipe does not fit the data, the machine or the run folder; raised on
            all ranks, before anything is written.
    """

    def __init__(self, loaded: Loaded, job: Job, *, quiet: bool = False) -> None:
        self.name, self.recipe, self.job = loaded.name, loaded.recipe, job
        self.notices = loaded.notices
        self.mlperf = MLPerfLog(loaded.recipe, job)
        started = job.from_main(time.strftime("%Y-%m-%d_%H-%M-%S"))
        with job.raise_on_all_ranks():
            made = build.prepare(loaded, job, started)
        job.check_alike(made.facts(loaded.recipe))
        recipe, plan, saved = self.recipe, made.plan, made.saved
        self.run_dir = made.run_dir
        self.loader, self.val_loader = made.loader, made.val_loader
        self.timeline, self.last_step = made.timeline, made.last_step
        self.total_steps = made.timeline.total_steps
        self.schedule = made.schedule
        self.model = made.model.to(job.device)
        if recipe.channels_last:  # which convolutions then give their outputs too
            self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = made.optimizer

        self.step: int = saved.get("step", 0)
        if saved and recipe.precision == "auto":
            self.precision = build.named_precision(recipe, saved["precision"]["name"], job)
        else:
            self.precision = build.build_precision(recipe, job, self.model, self.loader)
        share_statistics(self.model, recipe, job)  # not sooner: `auto` tries a copy of the model
        self.model = self.precision.convert(self.model)
        timeout = timedelta(seconds=recipe.comm.timeout_seconds)
        topology = Topology.from_environment(recipe.comm.ranks_per_node, timeout=timeout)
        with job.raise_on_all_ranks():
            plan.check(topology)
        self.ddp = data_parallel(self.model, job, plan, topology) if job.world_size > 1 else None
        self.network: nn.Module = self.ddp or self.model
        if recipe.compile:
            self.network.compile()
        if self.ddp:
            lay_out_buckets(self.ddp, self.optimizer, self.precision, self.loader)
        self.average = WeightAverage.of(recipe.ema, self.model, self.optimizer)
        if made.resume_from:  # after DDP, which starts by copying rank 0's buffers to all ranks
            checkpoint.load(made.resume_from, self.model, self.optimizer, job, self.average)
            self.precision.load_state_dict(saved["precision"]["state"])
        self.scheduler = as_scheduler(self.optimizer, self.schedule, steps_done=self.step)
        self.trust_ratios = None
        if recipe.trust_ratios_every and isinstance(self.optimizer, LARS):
            self.trust_ratios = TrustRatioHistory(self.optimizer)
        loaders = {"train": self.loader, "val": self.val_loader}
        self.skipped = SkippedImages(
            self.run_dir, job, {split: loader for split, loader in loaders.items() if loader}
        )
        self.checkpoints = Checkpoints(
            self.run_dir / checkpoint.CHECKPOINTS, job, keep=recipe.checkpoint.keep
        )
        self.display = Display(
            shows=job.is_main and not quiet, total_steps=self.last_step, epochs=recipe.epochs
        )
        self._good_step = self.step + 1  # up to which losses are known to be finite
        self._signal = 0  # that this process got
        self._stop = 0  # that all ranks agreed to stop for
        self._reached: float | None = saved.get("reached")  # top-1 that was at least the target

        lines = banner(self.name, recipe, made, self.precision.name, job, topology)
        self.display.say("\n  ".join((lines, *self.notices)))
        if recipe.resume.from_ and not made.resume_from:
            self.display.say("no checkpoint yet to resume from: training starts at step 0")
        if made.resume_from:
            self.display.say(f"resumed from {made.resume_from} at step {self.step}")
            for line in [*differences(saved["recipe"], self._resolved()), *made.changes]:
                self.display.say(f"  {line}")

    def run(self) -> dict[str, Any]:
        """Train, evaluate, and write the run folder.

        Returns:
            The summary, as in ``summary.json``; empty on ranks that do not lead.

        Raises:
            SystemExit: after SIGTERM or SIGINT, with a checkpoint written.
            TrainingError: the loss or the weights are not finite any more, or too many steps in a
                row were skipped; raised on all ranks, and the checkpoints are from before.
        """
        check_shared(self.run_dir, self.job)
        with self.job.raise_on_all_ranks():
            log = self._open_log()
        try:
            self._train(log)
        finally:
            self.mlperf.close()
            self.display.stop()
            if log:
                log.close()
        if self._stop:
            self.display.say(
                f"stopped by a signal at step {self.step} of {self.last_step}; "
                f"run_dir={self.run_dir} resume=true goes on from there"
            )
            raise SystemExit(128 + self._stop)
        average = self.average.state_dict(self.job) if self.average else None
        average_buffers(self.model, self.job)
        return self._finish(average)

    def _train(self, log: MetricsLog | None) -> None:
        """Train to the last step, the target or a signal."""
        recipe = self.recipe
        meter = Meter(self.job.device)
        batches = iter(self.loader)
        reached = recipe.reached(self._reached)
        self.display.start(self.step)
        interval = Interval(self.loader.wait_seconds)
        with noted(signal.SIGTERM, signal.SIGINT, note=self._note_signal):
            while self.step < self.last_step and not reached and not self._stop:
                with self.mlperf.step():
                    self._update(batches, meter)
                interval.step(self.loader.wait_seconds)
                self.step += 1
                if self.average and self._due(recipe.ema.every):
                    self.average.update()
                self.display.advance()
                last = self.step == self.last_step
                logs = last or self._due(recipe.log_every)
                if logs:
                    self._log_training(log, meter, interval)
                    interval = Interval(self.loader.wait_seconds)
                with interval.paused():
                    if self.val_loader and (last or self._due(recipe.evaluate_every)):
                        reached = self._evaluate(log)
                if self.trust_ratios and (last or self._due(recipe.trust_ratios_every)):
                    self._record_trust_ratios(log, self.trust_ratios)
                if reached and not logs:
                    self._log_training(log, meter, interval)
                with interval.paused():
                    if last or reached or self._stop or self._due(recipe.checkpoint.every):
                        self._save()

    def _note_signal(self, number: int) -> None:
        self._signal = number  # training stops for it when the meters are read

    def _update(self, batches: Iterator[Batch], meter: Meter) -> None:
        """One optimizer step on one global batch."""
        # Dropout and its like, as a function of where training stands.
        place = (self.recipe.seed * 1_000_003 + self.step) * 1_000_003 + self.job.rank
        torch.manual_seed(place % 2**63)
        accumulation = self.loader.accumulation
        for micro_batch in range(accumulation):
            images, labels = next(batches)
            reduces = micro_batch == accumulation - 1
            with nullcontext() if reduces or self.ddp is None else self.ddp.no_sync():
                with self.precision.forward():
                    logits = self.network(images)
                loss = F.cross_entropy(
                    logits.float(), labels, label_smoothing=self.recipe.label_smoothing
                )
                self.precision.backward(loss / accumulation)
            meter.add(loss.detach(), logits.detach(), labels)
        try:
            self.precision.step(self.optimizer)
        except GradientOverflowError as error:  # on all ranks: they have the same gradients
            raise self._cannot_go_on(str(error), self.step + 1) from error
        if self.trust_ratios:
            self.trust_ratios.record()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()

    def _log_training(self, log: MetricsLog | None, meter: Meter, interval: Interval) -> None:
        values, images = meter.read(self.job)
        # The signal goes along: ranks that got it and ranks that did not must stop at one step.
        seconds, stop, skips, *waits = self.job.all_reduce_max(
            interval.seconds(), self._signal, self.skipped.news, *interval.waits
        )
        self._stop = int(stop)
        if skips:
            self._record_skipped()
        values |= {
            "lr": self.schedule(self.step - 1),
            "images_per_second": images / seconds,
            "wait_seconds": sum(waits),
            "seconds": seconds,
        }
        if self.timeline.changes_batch:
            values["batch_size"] = self.timeline.batch_size(self.step - 1)
        if self.precision.scales:
            values |= {
                "loss_scale": self.precision.loss_scale,
                "skipped_steps": float(self.precision.skipped_steps),
            }
        self._record(log, "train", values, {"step_wait_seconds": [round(w, 6) for w in waits]})
        if not math.isfinite(values["loss"]):
            raise self._cannot_go_on(f"the loss is {values['loss']}", self.step)
        self._good_step = self.step

    def _cannot_go_on(self, what: str, step: int) -> TrainingError:
        """What to tell of a run that diverged, noticed at ``step``."""
        # A loss is that of the weights before its step.
        good = checkpoint.latest(self.checkpoints.folder, before=self._good_step)
        advice = "lower optimizer.lr or lengthen schedule.warmup"
        return TrainingError(
            f"training diverged: {what} at step {step} of {self.last_step}, learning rate "
            f"{self.schedule(step - 1):.4g}; "
            + (f"the last good checkpoint is {good}" if good else "there is no checkpoint yet")
            + f"; {advice}"
            + (f", and go on from there with resume={good} and another run_dir" if good else "")
        )

    def _evaluate(self, log: MetricsLog | None) -> bool:
        """Evaluate and record it; whether the target is reached."""
        assert self.val_loader is not None
        start = time.perf_counter()
        # Not kept: training goes on the same whether it was evaluated or not.
        with self.mlperf.evaluation(), averaged_buffers(self.model, self.job):
            values = evaluate(self.model, self.val_loader, self.precision, self.job)
        self.mlperf.accuracy(values["top1"])
        if self.average:
            values |= self.average.evaluate(self.val_loader, self.precision, self.job)
        values["seconds"] = time.perf_counter() - start
        self._record(log, "val", values)
        reached = self.recipe.reached(values["top1"])
        self._reached = values["top1"] if reached else None
        return reached

    def _record(
        self,
        log: MetricsLog | None,
        split: str,
        values: dict[str, float],
        lists: dict[str, list[float]] | None = None,
    ) -> None:
        if log:
            log.write(split, self.step, self.loader.epoch, values, lists)
        self.display.metrics(split, self.step, self.loader.epoch, values)

    def _record_skipped(self) -> None:
        for line in self.skipped.record():
            self.display.say(line)

    def _record_trust_ratios(self, log: MetricsLog | None, history: TrustRatioHistory) -> None:
        ratios = history.read()
        if log:  # they are the same on all ranks
            log.histograms("trust_ratio", self.step, self.loader.epoch, ratios)

    def _due(self, every: Span | None) -> bool:
        """Whether the step just made is the first past a multiple of ``every``."""
        return every is not None and self.timeline.due(every, self.step)

    def _save(self) -> None:
        # A last update may have broken weights whose loss was still good.
        finite = all(bool(torch.isfinite(v).all()) for v in self.model.state_dict().values())
        if self.job.all_reduce_max(float(not finite))[0]:
            raise self._cannot_go_on("weights or batch statistics are not finite", self.step)
        state = {
            "loader": self.loader.state_dict(),
            "precision": {"name": self.precision.name, "state": self.precision.state_dict()},
            "recipe": self._resolved(),
            "reached": self._reached,
        }
        self.checkpoints.save(self.step, self.model, self.optimizer, state, self.average)

    def _finish(self, average: dict[str, Tensor] | None) -> dict[str, Any]:
        self._record_skipped()
        if not self.job.is_main:
            return {}
        exported = full_precision_state_dict(self.model, self.optimizer)
        write_weights(self.run_dir / WEIGHTS, exported)
        if average:
            write_weights(self.run_dir / WEIGHTS_EMA, average)
        report = write_report(self.run_dir, title=f"{self.name}, seed {self.recipe.seed}")
        summary = summarise(
            self.run_dir,
            {
                "recipe": self.name,
                "seed": self.recipe.seed,
                "batch_size": self.loader.batch_size,
                "micro_batch_size": self.loader.micro_batch_size,
                "batch_norm_images": statistics_images(
                    self.model, self.loader.phases[0].micro_batch_size
                ),
                "world_size": self.job.world_size,
                "device": str(self.job.device.type),
                "precision": self.precision.name,
                "backend": self.loader.backend,
                "total_steps": self.total_steps,
                "skipped_images": self.skipped.count,
            },
        )
        summary["input_advice"] = input_advice(summary, self.loader, self.job)
        write_summary(self.run_dir, summary)
        self.display.results(summary, self.run_dir, report)
        return summary

    def _open_log(self) -> MetricsLog | None:
        if not self.job.is_main:
            return None
        with writing(self.run_dir):
            head = "".join(
                f"# {s}\n" for s in (f"The recipe {self.name} as it ran.", *self.notices)
            )
            (self.run_dir / RECIPE).write_text(head + dump(self.recipe))
            loaders = (self.loader, self.val_loader)
            self.mlperf.open(self.run_dir, loaders, self.model, self.step, self.display.say)
            return MetricsLog(self.run_dir, self.step)

    def _resolved(self) -> dict[str, Any]:
        return self.recipe.model_dump(mode="json", by_alias=True)
