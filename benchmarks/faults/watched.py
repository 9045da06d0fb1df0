"""A callback that says what each rank is doing, and can put a number into it that is not finite."""

from __future__ import annotations

import faulthandler
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.recipes.training.callbacks import Callback, RunContext

#: Environment variables: the folder of marks, and what is injected, as JSON.
MARKS, INJECTED = "LARGEBATCH_FAULTS_MARKS", "LARGEBATCH_FAULTS_INJECTED"
#: How the files begin that hold what ranks print, in the folder of marks.
SAID = "said-"
#: How the files begin that hold where a rank was that had not begun in time.
STACKS = "stack-"
#: Seconds after which a rank that has not begun to train writes down where it is.
BEGUN_BY_SECONDS = 40.0
_LENGTH = 32  # bytes of a mark


class Watched(Callback):
    """Writes what a rank is doing into a file, such as ``step 7``, with the process's id."""

    all_ranks = True

    def __init__(self) -> None:
        self._file, self._step = -1, 0
        self._injected: dict[str, Any] = json.loads(os.environ.get(INJECTED, "{}"))

    def on_start(self, run: RunContext) -> None:
        faulthandler.cancel_dump_traceback_later()
        if MARKS in os.environ:
            path = Path(os.environ[MARKS]) / f"rank-{run.job.rank}"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT)
        self._mark("start", run.step)
        if self._injected and self._injected["rank"] == run.job.rank:
            self._model = run.model
            self._weight = max(run.model.parameters(), key=Tensor.numel)
            if self._injected["into"] == "input":
                run.model.register_forward_pre_hook(self._into_input)
            elif self._injected["into"] == "gradient":
                self._weight.register_hook(self._into_gradient)
        else:
            self._injected = {}

    def on_step_begin(self, step: int) -> None:
        self._step = step + 1
        self._mark("step", self._step)
        if self._injected.get("into") == "weight" and self._is_due():
            with torch.no_grad():
                self._weight.view(-1)[0] = float(self._injected["value"])

    def on_evaluation_begin(self, step: int) -> None:
        self._mark("evaluation", step)

    def on_evaluation_end(self, step: int, values: dict[str, float]) -> None:
        self._mark("after", step)

    def on_end(self, status: str, summary: dict[str, Any]) -> None:
        self._mark("end", self._step)

    def _mark(self, phase: str, step: int) -> None:
        if self._file >= 0:
            os.pwrite(self._file, f"{os.getpid()} {phase} {step}".ljust(_LENGTH).encode(), 0)

    def _is_due(self) -> bool:
        return self._step == self._injected["step"]

    def _into_input(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        if not (module.training and self._is_due()):
            return None
        images = inputs[0].clone()
        images[0, 0, 0, 0] = float(self._injected["value"])
        return (images, *inputs[1:])

    def _into_gradient(self, gradient: Tensor) -> Tensor | None:
        if not self._is_due():
            return None
        spoilt = gradient.clone()
        spoilt.view(-1)[0] = float(self._injected["value"])
        return spoilt


def read_marks(folder: Path) -> dict[int, tuple[int, str, int]]:
    """Return the process, phase and step of each rank that has begun, by rank."""
    found = {}
    for path in folder.glob("rank-*"):
        words = path.read_text().split()
        if len(words) == 3:
            found[int(path.name[5:])] = (int(words[0]), words[1], int(words[2]))
    return found
