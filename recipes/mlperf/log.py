"""The log of a run as the closed division of MLPerf Training wants it, for ResNet-50 with LARS.

Written with MLCommons' ``mlperf_logging``, for the rules of round 4.0 (the last with ResNet-50):
``python -m mlperf_logging.compliance_checker --usage training --ruleset 4.0.0 FILE`` checks it.
What each key means: mlcommons/training_policies, training_rules.adoc.

An epoch is a number of images, so it ends at the first step at or past it. Evaluations are logged
at the epochs that were given out by then, such as 4.041.

Submitters counted ``lars_opt_learning_rate_decay_steps`` in two ways: from the end of warm-up (as
the reference point at batch 65,536) or from the start of the run (as that at 13,056). The log has
them as the recipe counts its decay, by ``schedule.decay_from``.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...pipeline import Loader
from ..errors import RecipeError
from ..models.batch_norm import statistics_images
from ..ranks import Job
from ..schema.recipe import Recipe
from ..training.lr import learning_rates
from ..training.timeline import timeline_of
from .rules import TARGET_ACCURACY, check_rules, departures

_RUN_STOP = '"key": "run_stop"'


def log_path(recipe: Recipe, run_dir: Path) -> Path | None:
    """Where the log goes: a relative path is in the run's folder. None: no log."""
    return None if recipe.mlperf.log is None else run_dir / recipe.mlperf.log


def check_mlperf(recipe: Recipe, run_dir: Path, job: Job) -> None:
    """See that the log can be written, and that the recipe keeps the division's rules.

    Raises:
        RecipeError: the library is missing, a key breaks a rule, or the file holds another run.
    """
    path = log_path(recipe, run_dir)
    if path is None:
        return
    check_rules(recipe)
    if job.is_main and importlib.util.find_spec("mlperf_logging") is None:
        raise RecipeError(
            "mlperf.log: needs the package mlperf-logging, which is not installed; "
            "pip install 'largebatch[mlperf]' brings it"
        )
    if job.is_main and path.exists() and recipe.resume.from_ != "latest":
        raise RecipeError(f"mlperf.log: {path} already exists; valid: a new file for each run")


class MLPerfLog:
    """Follows a run and writes its log, on the rank that leads; elsewhere, and where the recipe
    asks for no log, it does nothing.

    A run that was stopped is not timed from its start to its end, and so is no run of the
    division: when it is resumed, the log is marked as aborted and stays as it is. A run that is
    restarted before its first checkpoint starts at step 0 with a new log, and the old one is kept
    beside it.

    Args:
        recipe: of the run.
        job: its ranks. Made before data and model, it takes the time of ``init_start``.
    """

    def __init__(self, recipe: Recipe, job: Job) -> None:
        self._recipe, self._job = recipe, job
        self._init_ms = _now_ms()
        self._log: Any = None  # mlperf_logging's logger, from open to the end of the run
        self._in_run = self._in_block = False
        self._epoch = 0  # in which training stands, from 1; 0: none has begun

    def open(
        self,
        run_dir: Path,
        loaders: tuple[Loader, Loader | None],
        model: nn.Module,
        made: int,
        say: Callable[[str], None],
    ) -> None:
        """Log what is known before the first image is read.

        Args:
            run_dir: the run's folder.
            loaders: of the images to train on and to evaluate.
            model: as it is trained.
            made: updates already made, above 0 in a resumed run.
            say: shows a line to the user.

        Raises:
            RecipeError: the file cannot be written.
        """
        path = log_path(self._recipe, run_dir)
        if path is None or not self._job.is_main:
            return
        self._loader, val_loader = loaders
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if made:
                self._end_of_stopped_run(path)
                say(f"  mlperf.log: a resumed run is none of the closed division; {path} has ended")
                return
            if path.exists():
                path.rename(_free_name(path))
            self._log = _logger(path, "w")
        except OSError as error:
            raise RecipeError(
                f"mlperf.log: {path} cannot be written: {error.strerror}; valid: a file"
            ) from error
        val_images = len(val_loader.source) if val_loader else 0
        other = departures(self._recipe, len(self._loader.source), val_images)
        if other:
            say(f"  mlperf.log: not the benchmark itself: {'; '.join(other)}")
        self._log.event("cache_clear", self._recipe.mlperf.cache_cleared, time_ms=self._init_ms)
        self._log.start("init_start", time_ms=self._init_ms)
        for key, value in self._facts(val_images, model).items():
            self._log.event(key, value)
        self._log.end("init_stop")

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around each update; the first image is read in the first of them."""
        if self._log is None:
            yield
            return
        epochs = self._loader.epoch
        if not self._in_run:
            self._log.start("run_start")
            self._in_run = True
        if not self._in_block:
            every = self._recipe.evaluate_every
            assert every is not None  # by the rules, which also have it in epochs
            left = self._recipe.epochs - epochs
            self._block = {"first_epoch_num": int(epochs) + 1}
            count = {"epoch_count": _short(min(every.value, left))}
            self._log.start("block_start", metadata={**self._block, **count})
            self._in_block = True
        if not self._epoch:
            self._epoch = int(epochs) + 1
            self._log.start("epoch_start", metadata={"epoch_num": self._epoch})
        yield
        if self._loader.epoch >= self._epoch - 1e-9:
            self._log.end("epoch_stop", metadata={"epoch_num": self._epoch})
            self._epoch = 0

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around each evaluation."""
        if self._log is None:
            yield
            return
        if self._in_block:
            self._log.end("block_stop", metadata=self._block)
            self._in_block = False
        self._log.start("eval_start", metadata=self._at())
        yield
        self._log.end("eval_stop", metadata=self._at())

    def accuracy(self, top1: float) -> None:
        """After each evaluation: its ``top1`` in percent. The target ends the timed run."""
        if self._log is None:
            return
        self._log.event("eval_accuracy", top1 / 100, metadata=self._at())
        if top1 >= TARGET_ACCURACY:
            self._stop("success")

    def close(self) -> None:
        """At the end of the run, however it comes."""
        if self._log is not None:
            self._stop("aborted")

    def _stop(self, status: str) -> None:
        if self._in_run:
            self._log.end("run_stop", metadata={"status": status, **self._at()})
        for handler in self._log.logger.handlers:
            handler.close()
        self._log = None

    def _at(self) -> dict[str, Any]:
        return {"epoch_num": _short(self._loader.epoch)}

    def _facts(self, val_images: int, model: nn.Module) -> dict[str, Any]:
        """The run's hyper-parameters, and who submits it, by their keys in the log."""
        recipe, loader = self._recipe, self._loader
        options, schedule, mlperf = recipe.optimizer, recipe.schedule, recipe.mlperf
        found = learning_rates(recipe, timeline_of(recipe, len(loader.source)))
        decay_steps = found.decay_steps
        if schedule.decay_from == "start":
            decay_steps += found.warmup_steps
        warmup = schedule.warmup
        in_epochs = found.warmup_steps / loader.steps_per_epoch
        return {
            "submission_benchmark": "resnet",
            "submission_division": "closed",
            "submission_org": mlperf.org,
            "submission_platform": mlperf.platform or _platform(self._job),
            "submission_status": mlperf.status,
            "seed": recipe.seed,
            "global_batch_size": recipe.batch_size,
            "gradient_accumulation_steps": loader.accumulation,
            "train_samples": len(loader.source),
            "eval_samples": val_images,
            "model_bn_span": statistics_images(model, loader.micro_batch_size) or 0,
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
            "lars_epsilon": options.eps,
            "label_smoothing": recipe.label_smoothing,
        }

    def _end_of_stopped_run(self, path: Path) -> None:
        """Mark the log of a run that was killed; one that could still write has done so."""
        if path.exists() and _RUN_STOP not in path.read_text():
            self._log, self._in_run = _logger(path, "a"), True
            self._stop("aborted")


def _logger(path: Path, mode: str) -> Any:
    from mlperf_logging.mllog.mllog import MLLogger

    logger = logging.Logger("mlperf", logging.INFO)  # of its own: others add no lines
    logger.addHandler(logging.FileHandler(path, mode))
    return MLLogger(logger, root_dir=re.escape(str(Path(__file__).parents[2])))


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _platform(job: Job) -> str:
    """Machines x accelerators in each, and what those are."""
    cuda = job.device.type == "cuda"
    what = torch.cuda.get_device_name(job.device) if cuda else platform.machine() + " CPU"
    return f"{job.world_size // job.local_world_size}x{job.local_world_size} {what}"


def _short(number: float) -> float:
    """Whole numbers as such, others to a thousandth, as the checker of convergence reads them."""
    return int(number) if number == int(number) else round(number, 3)


def _now_ms() -> int:
    return int(time.time() * 1000)
