"""What ``largebatch critical-batch`` does: check its options, estimate, predict, and report."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import RecipeError
from ...ranks import device_of, joined
from ...schema.load import Loaded, load
from ...schema.lr_scaling import RULES
from .estimate import METHODS, Budget, estimate
from .hours import Gpus
from .picture import draw
from .prices import prices
from .report import NUMBERS, PICTURE, Hours, as_json, print_summary
from .result import Estimate
from .runs import Base


@dataclass(frozen=True)
class Options:
    """What the user asked for; the names are those of the command's options."""

    recipe: str
    overrides: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    epochs: float | None = None
    rule: str | None = None
    method: str = "runs"
    minutes: float | None = None
    max_epochs: float | None = None
    workers: int = 1
    gpus: Gpus = field(default_factory=Gpus)
    out: Path | None = None
    json: bool = False

    @property
    def budget(self) -> Budget:
        """What the runs may cost."""
        if self.minutes is None and self.max_epochs is None:
            return Budget(minutes=15.0)
        return Budget(self.minutes, self.max_epochs)

    def loaded(self) -> Loaded:
        """The recipe with the overrides."""
        return load(self.recipe, self.overrides)

    def folder(self, name: str) -> Path:
        """Folder of the estimate of a recipe."""
        return self.out or Path("critical-batch") / name

    def check(self, processes: int) -> None:
        """Check all that can be known before anything is trained.

        Raises:
            RecipeError, DataError: An option is invalid, or does not fit the recipe or the data.
        """
        for option, value, valid in (
            ("--rule", self.rule, RULES),
            ("--method", self.method, METHODS),
        ):
            if value is not None and value not in valid:
                raise RecipeError(f"{option}: unknown: {value!r}; valid: {', '.join(valid)}")
        if self.workers > 1 and processes > 1:
            raise RecipeError(
                f"--workers: {self.workers} runs side by side do not go with --nproc {processes}; "
                "valid: one of the two"
            )
        loaded = self.loaded()
        device_of(loaded.recipe, processes - 1)
        base = Base.of(loaded, self.folder(loaded.name), processes, self.rule)
        if self.batches:
            base.check_batches(self.batches)
        self.gpus.check(loaded)

    def arguments(self) -> list[str]:
        """The arguments of the command for a process of torchrun."""
        found = [self.recipe, *self.overrides, "--method", self.method]
        for option, value in (
            ("--batches", ",".join(map(str, self.batches)) or None),
            ("--epochs", self.epochs),
            ("--rule", self.rule),
            ("--minutes", self.minutes),
            ("--max-epochs", self.max_epochs),
            ("--out", self.out),
        ):
            if value is not None:
                found += [option, str(value)]
        return [*found, *self.gpus.arguments(), *["--json"] * self.json]


def whole_numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Parse whole numbers with commas between them.

    Raises:
        RecipeError: The text is something else, or a number is not above 0.
    """
    if text is None:
        return ()
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise RecipeError(
            f"{option}: {text!r} is not a list of whole numbers above 0; valid: such as 64,128"
        )
    return found


def run(options: Options) -> None:
    """Estimate on the ranks that torchrun started, or in this process; rank 0 reports.

    Raises:
        RecipeError, DataError: As :func:`.estimate.estimate`, or no loss can be compared.
    """
    loaded = options.loaded()
    out = options.folder(loaded.name)
    with joined(loaded.recipe) as job:
        result = estimate(
            loaded,
            job,
            out,
            batches=options.batches,
            epochs=options.epochs,
            rule=options.rule,
            budget=options.budget,
            method=options.method,
            workers=options.workers,
            say=lambda line: print(line, file=sys.stderr if options.json else None, flush=True),
        )
        is_main = job.is_main
    if is_main:
        report(result, options, out)


def report(result: Estimate, options: Options, out: Path) -> None:
    """Print an estimate, and write its numbers and its picture.

    Raises:
        RecipeError: One of them cannot be written.
    """
    found = prices(result)
    hours: Hours = options.gpus.hours(result.base.loaded, found)
    content = json.dumps(as_json(result, found, hours), indent=2)
    try:
        (out / NUMBERS).write_text(content + "\n")
    except OSError as error:
        raise RecipeError(
            f"--out: cannot write {out / NUMBERS}: {error.strerror}; valid: another folder"
        ) from None
    draw(result, found, out / PICTURE)
    if options.json:
        print(content)
        return
    print_summary(result, found, hours)
    for name in (NUMBERS, PICTURE):
        print(out / name)
