"""The finished runs of an estimate, as JSON lines: what makes it resumable.

The first line holds the recipe and the rule of all runs in the file; each further line is a run
that ended. A line is written at once and synchronized, so that an interruption costs the run that
is under way, and nothing else.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import RecipeError
from ...ranks import Job
from ...schema.load import differences, with_defaults
from .runs import Base, Run

#: Name of the file in the folder of an estimate.
JOURNAL = "runs.jsonl"


@dataclass(frozen=True)
class Record:
    """A run that ended.

    Attributes:
        run: The run.
        status: ``finished``, or ``diverged``.
        loss: Mean training loss over the last part of the run, above the lowest that is possible;
            infinite if it diverged.
        top1: Accuracy on the held-out images at the end, in percent.
        held_out_loss: Loss there, without label smoothing; infinite if it diverged.
        trained: Epochs of training that it cost.
        seconds: Time that it took, divided among runs side by side.
        train_seconds: Part of that in training steps, without start and evaluation.
        precision: Precision that it ran in.
        noise: Triples of epoch, gradient noise scale in images and its standard error.
        kind: ``run``; ``probe``: a short one that only measures the speed; ``trunk``: a run that
            others branch off from.
    """

    run: Run
    status: str
    loss: float
    top1: float
    held_out_loss: float
    trained: float
    seconds: float
    train_seconds: float
    precision: str
    noise: tuple[tuple[float, float, float], ...] = ()
    kind: str = "run"


class Journal:
    """The records of an estimate in a folder, which all ranks have in memory; rank 0 writes.

    Args:
        base: The recipe of the runs.
        job: The ranks; all make a journal together.

    Raises:
        AgreedError: The folder holds runs of another recipe or rule, or cannot be read.
    """

    def __init__(self, base: Base, job: Job) -> None:
        self.path = base.path.with_name(JOURNAL)
        self.records: list[Record] = []
        self.choices: dict[str, Any] = {}
        self._job = job
        lines: list[dict[str, Any]] = []
        with job.raise_on_all_ranks():
            if job.is_main:
                lines = self._open(base)
        for line in job.gather(lines)[0]:
            if "choices" in line:
                self.choices.update(line["choices"])
            else:
                self.records.append(_record(line))

    @property
    def seconds(self) -> float:
        """Time that all runs took, with that in which workers waited for others."""
        waited: float = self.choices.get("waited_seconds", 0.0)
        return waited + sum(record.seconds for record in self.records)

    @property
    def trained(self) -> float:
        """Epochs that all runs trained."""
        return sum(record.trained for record in self.records)

    def find(self, run: Run, kind: str = "run") -> Record | None:
        """The record of a run, None if it has not ended yet."""
        return next((r for r in self.records if r.run == run and r.kind == kind), None)

    def choose(self, **choices: Any) -> None:
        """Write choices made for the user, which a resumed estimate keeps."""
        self.choices.update(choices)
        self._append({"choices": choices})

    def wait(self, seconds: float) -> None:
        """Write time in which runs side by side waited for each other."""
        before = self.choices.get("waited_seconds", 0.0)
        self.choose(waited_seconds=before + max(0.0, seconds))

    def append(self, record: Record) -> None:
        """Write a record."""
        self.records.append(record)
        content = asdict(record)
        for key in ("loss", "held_out_loss"):
            if not math.isfinite(content[key]):
                content[key] = None
        self._append(content)

    def _append(self, content: dict[str, Any]) -> None:
        if not self._job.is_main:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _open(self, base: Base) -> list[dict[str, Any]]:
        """Read the lines of an estimate that was begun, or begin one."""
        head = {"rule": base.rule, "recipe": base.recipe.model_dump(mode="json", by_alias=True)}
        try:
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            # A line without an end was cut off by a crash.
            lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
            earlier: dict[str, Any] = lines[0] if lines else head
            before = with_defaults(earlier["recipe"], base.recipe)
            changed = differences({"recipe": before}, {"recipe": head["recipe"]})
            chosen = [line["choices"] for line in lines if "epochs" in line.get("choices", ())]
            if not all("one_pass" in choices for choices in chosen):
                raise KeyError("one_pass")  # by an earlier version, which did not keep it
            if earlier["rule"] != base.rule:
                changed.append(f"--rule is now {base.rule}, was {earlier['rule']}")
        except OSError as error:
            raise RecipeError(f"--out: cannot read {self.path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RecipeError(
                f"--out: {self.path} is not what this command writes; valid: another folder"
            ) from None
        if changed:
            what = changed[0].removeprefix("recipe.")
            raise RecipeError(
                f"--out: {self.path.parent} holds runs of another recipe: {what}; valid: another "
                "folder"
            )
        base.write()
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in lines or [head]))
        os.replace(partial, self.path)
        return lines[1:]


def _record(line: dict[str, Any]) -> Record:
    infinite = {key: math.inf for key in ("loss", "held_out_loss") if line[key] is None}
    noise = tuple((epoch, value, error) for epoch, value, error in line["noise"])
    return Record(**{**line, **infinite, "run": Run(**line["run"]), "noise": noise})
