"""Tune one cell of large_batch.py by ``largebatch tune lr``'s search, and print its trials as JSON.

It runs as a process of its own, which large_batch.py starts with the environment of a run. A search
that was interrupted continues from its folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.recipes.large_batch_starts import HELD_OUT, RECIPES, starts
from largebatch.recipes.ranks import joined
from largebatch.recipes.schema.load import load
from largebatch.recipes.tune.learning_rate.search import Options, search
from largebatch.recipes.tune.learning_rate.trials import Tried

#: What the rows of trials name as their method. Those of before have the method named in them.
METHOD = "largebatch tune lr"


def tune(
    optimizer: str,
    batch_size: int,
    trials: int,
    data: Path,
    out: Path,
    *,
    minutes: float | None = None,
) -> list[dict[str, Any]]:
    """Search for the learning rate and warm-up of a cell and return a row for each trial.

    All trials have the length of the recipe, so that those of all cells compare. The first ones are
    the cell's starts; the range of learning rates reaches to half and twice these.

    Args:
        optimizer: A key of ``RECIPES``.
        batch_size: Global batch size in images.
        trials: Number of trials.
        data: Folder of the data set.
        out: Folder of the study.
        minutes: Limit of time; None: no limit.
    """
    recipe = RECIPES[optimizer]
    overrides = [f"data.path={data}", f"batch_size={batch_size}", f"data.holdout={HELD_OUT}"]
    loaded = load(recipe, overrides)
    epochs, first = loaded.recipe.epochs, starts(optimizer, batch_size)
    rates = [lr for lr, _ in first]
    options = Options(
        lr=(min(rates) / 2, 2 * max(rates)),
        coarse=1,
        trials=trials,
        minutes=minutes,
        guesses=tuple({"lr": lr, "warmup": warmup / epochs} for lr, warmup in first),
    )
    with joined(loaded.recipe) as job:
        found = search(recipe, overrides, job, out, options, say=_say)
    return [_row(trial, epochs) for trial in found.trials if trial.counts]


def _row(trial: Tried, epochs: float) -> dict[str, Any]:
    """The settings and the result of a trial, as large_batch.json has them."""
    diverged = trial.state == "diverged" or trial.top1 is None
    return {
        "lr": trial.settings["lr"],
        "warmup_epochs": round(trial.settings["warmup"] * epochs, 4),
        # Once the loss is no longer finite, the network predicts at chance level.
        "top1": 10.0 if diverged or trial.top1 is None else round(trial.top1, 2),
        "diverged": diverged,
        "epochs": round(trial.epochs, 2),
        "train_seconds": round(trial.seconds),
        "date": date.today().isoformat(),
        "method": METHOD,
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", choices=RECIPES, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float)
    options = parser.parse_args()
    rows = tune(
        options.optimizer,
        options.batch_size,
        options.trials,
        options.data,
        options.out,
        minutes=options.minutes,
    )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
