"""The log of a run for the closed division of MLPerf Training: ResNet-50 with LARS.

It is written with MLCommons' ``mlperf_logging``, by the rules of round 4.0, the last with
ResNet-50. ``python -m mlperf_logging.compliance_checker --usage training --ruleset 4.0.0 FILE``
checks it. Meaning of each key: mlcommons/training_policies, training_rules.adoc.

An epoch is a number of images, so it ends at the first step at or past it. Evaluations are logged
at the epochs that were read by then, such as 4.041.

Submitters counted ``lars_opt_learning_rate_decay_steps`` in two ways: from the end of warm-up (as
the reference point at batch 65,536) or from the start of the run (as that at 13,056). The log
counts as the recipe does, by ``schedule.decay_from``.

Who submits is of the machine and not of the recipe. It comes from the environment, by the names
that submitters' own scripts export: ``MLPERF_SUBMISSION_ORG``, ``MLPERF_SUBMISSION_PLATFORM``,
``MLPERF_STATUS``, and ``MLPERF_CACHES_CLEARED=1`` where the machines' caches were cleared.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import torch

from ..errors import RecipeError
from ..models.batch_norm import statistics_images
from ..ranks import Job
from ..schema.recipe import Recipe
from ..training.callbacks import Callback, RunContext, Status
from ..training.timeline import learning_rates
from .rules import TARGET_ACCURACY, check_rules, departures

#: Availabilities of a system, as the division names them; the last is the default.
STATUSES = ("cloud", "onprem", "preview", "research")

_RUN_STOP = '"key": "run_stop"'


#: Name of the log in the run's folder: that of a submission's first result.
RESULT = "result_0.txt"


class MLPerfLog(Callback):
    """Writes ``result_0.txt`` of a run with ``track=[mlperf]``, on rank 0.

    A run that was stopped is not timed from its start to its end, so it cannot be submitted: the
    log is marked as aborted, and a resumed run leaves it as it is. A run that is restarted before
    its first checkpoint starts at step 0 with a new log and keeps the old one beside it.

    It is made before the data and the model, and takes the time of ``init_start`` then.
    """

    def __init__(self) -> None:
        self._init_ms = _now_ms()
        self._run: RunContext
        self._log: Any = None
        self._block: dict[str, Any] = {}  # between two evaluations, or the start and the first
        self._in_run = self._in_block = False
        self._epoch = 0  # number of the present epoch, from 1; 0 between epochs

    def check(self, recipe: Recipe, run_dir: Path, job: Job) -> None:
        """Refuse a recipe that breaks a rule of the division, or whose log cannot be written."""
        check_rules(recipe)
        if not job.is_main:
            return
        status = os.environ.get("MLPERF_STATUS") or STATUSES[-1]
        if status not in STATUSES:
            known = ", ".join(STATUSES)
            raise RecipeError(f"MLPERF_STATUS: no availability {status!r}; valid: {known}")
        if importlib.util.find_spec("mlperf_logging") is None:
            raise RecipeError(
                "track: mlperf needs the package mlperf-logging, which is not installed; valid: "
                "pip install 'largebatch[mlperf]', or track without mlperf"
            )
        path = run_dir / RESULT
        if path.exists() and recipe.resume.from_ != "latest":
            raise RecipeError(f"track: {path} already exists; valid: a new run_dir for each run")

    def on_start(self, run: RunContext) -> None:
        """Log what is known before the first image is read."""
        self._run = run
        path = run.run_dir / RESULT
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if run.step:
                self._end_log_of_killed_run(path)
                run.warn(
                    "mlperf: a resumed run cannot be submitted to the closed division; "
                    f"{path} has ended"
                )
                return
            if path.exists():
                path.rename(_free_name(path))
            self._log = _logger(path, "w")
        except OSError as error:
            raise RecipeError(f"track: {path} cannot be written: {error.strerror}") from error
        val_images = len(run.val_loader.source) if run.val_loader else 0
        other = departures(run.recipe, len(run.loader.source), val_images)
        if other:
            run.warn(f"mlperf: this run is not the benchmark: {'; '.join(other)}")
        # The trainer clears no caches of the machines, and cannot know who does.
        cleared = os.environ.get("MLPERF_CACHES_CLEARED") == "1"
        self._log.event("cache_clear", cleared, time_ms=self._init_ms)
        self._log.start("init_start", time_ms=self._init_ms)
        for key, value in self._facts(val_images).items():
            self._log.event(key, value)
        self._log.end("init_stop")

    def on_step_begin(self, step: int) -> None:
        """Start the timed run, a block and an epoch where the step is their first."""
        if self._log is None:
            return
        epochs = self._run.loader.epoch
        if not self._in_run:
            self._log.start("run_start")
            self._in_run = True
        if not self._in_block:
            every = self._run.recipe.evaluate_every
            assert every is not None  # by the rules, which also have it in epochs
            left = self._run.recipe.epochs - epochs
            self._block = {"first_epoch_num": int(epochs) + 1}
            count = {"epoch_count": _short(min(every.value, left))}
            self._log.start("block_start", metadata={**self._block, **count})
            self._in_block = True
        if not self._epoch:
            self._epoch = int(epochs) + 1
            self._log.start("epoch_start", metadata={"epoch_num": self._epoch})

    def on_step_end(self, step: int) -> None:
        """Stop the epoch if the step is its last."""
        if self._log is not None and self._run.loader.epoch >= self._epoch - 1e-9:
            self._log.end("epoch_stop", metadata={"epoch_num": self._epoch})
            self._epoch = 0

    def on_evaluation_begin(self, step: int) -> None:
        """Stop the block, and start the evaluation."""
        if self._log is None:
            return
        if self._in_block:
            self._log.end("block_stop", metadata=self._block)
            self._in_block = False
        self._log.start("eval_start", metadata=self._at())

    def on_evaluation_end(self, step: int, values: dict[str, float]) -> None:
        """Log the accuracy; the timed run ends when it reaches the target."""
        if self._log is None:
            return
        self._log.end("eval_stop", metadata=self._at())
        self._log.event("eval_accuracy", values["top1"] / 100, metadata=self._at())
        if values["top1"] >= TARGET_ACCURACY:
            self._stop("success")

    def on_end(self, status: Status, summary: dict[str, Any]) -> None:
        """Mark a run that did not reach the target as aborted."""
        if self._log is not None:
            self._stop("aborted")

    def _stop(self, status: str) -> None:
        if self._in_run:
            self._log.end("run_stop", metadata={"status": status, **self._at()})
        for handler in self._log.logger.handlers:
            handler.close()
        self._log = None

    def _at(self) -> dict[str, Any]:
        return {"epoch_num": _short(self._run.loader.epoch)}

    def _facts(self, val_images: int) -> dict[str, Any]:
        """The run's hyper-parameters and its submitter, by key of the log."""
        recipe, loader = self._run.recipe, self._run.loader
        bn_span = statistics_images(
            recipe, self._run.model, loader.micro_batch_size, self._run.job.world_size
        )
        options, schedule = recipe.optimizer, recipe.schedule
        found = learning_rates(recipe, self._run.timeline)
        decay_steps = found.decay_steps
        if schedule.decay_from == "start":
            decay_steps += found.warmup_steps
        warmup = schedule.warmup
        in_epochs = found.warmup_steps / loader.timeline.steps_per_epoch
        return {
            "submission_benchmark": "resnet",
            "submission_division": "closed",
            "submission_org": os.environ.get("MLPERF_SUBMISSION_ORG") or "unstated",
            "submission_platform": os.environ.get("MLPERF_SUBMISSION_PLATFORM")
            or _platform(self._run.job),
            "submission_status": os.environ.get("MLPERF_STATUS") or STATUSES[-1],
            "seed": recipe.seed,
            "global_batch_size": recipe.batch_size,
            "gradient_accumulation_steps": loader.accumulation,
            "train_samples": len(loader.source),
            "eval_samples": val_images,
            "model_bn_span": bn_span or 0,
            "opt_name": options.name,
            "lars_opt_base_learning_rate": options.lr,
            "lars_opt_end_learning_rate": schedule.end,
            "lars_opt_learning_rate_decay_poly_power": _short(schedule.power),
            "lars_opt_learning_rate_decay_steps": decay_steps,
            "lars_opt_learning_rate_warmup_epochs": _short(
                warmup.value if warmup.unit == "ep" else in_epochs
            ),
            "lars_opt_momentum": options.momentum,
            "lars_opt_weight_decay": options.weight_decay,
            "lars_epsilon": options.args.get("eps", 0.0),
            "label_smoothing": recipe.label_smoothing,
        }

    def _end_log_of_killed_run(self, path: Path) -> None:
        """Mark the log of a run that was killed; other runs have marked theirs."""
        if path.exists() and _RUN_STOP not in path.read_text():
            self._log, self._in_run = _logger(path, "a"), True
            self._stop("aborted")


def _logger(path: Path, mode: str) -> Any:
    from mlperf_logging.mllog.mllog import MLLogger

    logger = logging.Logger("mlperf", logging.INFO)  # its own, so that others add no lines
    logger.addHandler(logging.FileHandler(path, mode))
    return MLLogger(logger, root_dir=re.escape(str(Path(__file__).parents[2])))


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _platform(job: Job) -> str:
    """Number of machines x accelerators of each, and their name."""
    cuda = job.device.type == "cuda"
    what = torch.cuda.get_device_name(job.device) if cuda else platform.machine() + " CPU"
    return f"{job.world_size // job.local_world_size}x{job.local_world_size} {what}"


def _short(number: float) -> float:
    """An integer where it is one, else rounded to 1/1000, as the convergence checker reads it."""
    return int(number) if number == int(number) else round(number, 3)


def _now_ms() -> int:
    return int(time.time() * 1000)
