"""Write a run's recipe and results into its folder, next to metrics and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ...amp import Precision, full_precision_state_dict
from ..errors import StorageError
from ..models.batch_norm import statistics_images
from ..report.picture import write_picture
from ..schema.load import RECIPE, dump
from ..schema.recipe import Recipe
from .callbacks import RunContext
from .ending_table import Ending
from .input_advice import input_advice
from .metrics import read_metrics
from .run_dir import writing
from .run_files import CLASSES
from .saving import newest_in
from .summary import summarise, write_summary
from .weights import WEIGHTS, WEIGHTS_EMA, write_weights


def write_recipe(run_dir: Path, name: str, recipe: Recipe, notices: Iterable[str]) -> None:
    """Write ``recipe.yaml`` with every key, and make the folder.

    Raises:
        RecipeError: The folder cannot be made or written.
    """
    head = "".join(f"# {line}\n" for line in (f"The recipe {name} as it ran.", *notices))
    with writing(run_dir):
        (run_dir / RECIPE).write_text(head + dump(recipe))


def write_results(
    run: RunContext,
    precision: Precision,
    average: dict[str, Tensor] | None,
    skipped_images: int,
    ending: Ending,
) -> dict[str, Any]:
    """Write weights in FP32, report and summary of a run that has finished, and show its end.

    Args:
        run: The run.
        precision: The precision that it was trained in.
        average: State dict of the moving average of the weights, if there is one.
        skipped_images: Number of images that could not be used.
        ending: The end of the run.

    Returns:
        The summary.

    Raises:
        StorageError: A file cannot be written.
    """
    with _storage_errors(run.run_dir):
        write_weights(run.run_dir / WEIGHTS, full_precision_state_dict(run.model, run.optimizer))
        if average:
            write_weights(run.run_dir / WEIGHTS_EMA, average)
        report = write_picture(run.run_dir, title=f"{run.name}, seed {run.recipe.seed}")
        classes = "".join(f"{name}\n" for name in run.loader.source.classes)
        (run.run_dir / CLASSES).write_text(classes, encoding="utf-8")
        evaluated = [line["step"] for line in read_metrics(run.run_dir) if line["split"] == "val"]
        summary = summarise(run.run_dir, _facts(run, precision, skipped_images))
        # of top1, top5 and val_loss
        summary["evaluated_step"] = evaluated[-1] if evaluated else None
        summary["input_advice"] = input_advice(summary, run.loader, run.job)
        summary = ending.finished(run, summary)
        write_summary(run.run_dir, summary)
        ending.show(run, summary, {"run folder": run.run_dir, "report": report})
        return summary


def _facts(run: RunContext, precision: Precision, skipped_images: int) -> dict[str, Any]:
    """What a summary says of how a run was set up, and of its data."""
    loader = run.loader
    return {
        "recipe": run.name,
        "seed": run.recipe.seed,
        "batch_size": loader.batch_size,
        "micro_batch_size": loader.micro_batch_size,
        "batch_norm_images": statistics_images(run.model, loader.phases[0].micro_batch_size),
        "world_size": run.job.world_size,
        "device": run.job.device.type,
        "precision": precision.name,
        "backend": loader.backend,
        "total_steps": run.timeline.total_steps,
        "skipped_images": skipped_images,
        "train_images": len(loader.source),
        "val_images": len(run.val_loader.source) if run.val_loader else 0,
    }


@contextmanager
def _storage_errors(run_dir: Path) -> Iterator[None]:
    """Context manager that raises a StorageError for an OSError, and says how to go on."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"run_dir: the results cannot be written: {error.filename or run_dir}: "
            f"{error.strerror}; {newest_in(run_dir)}; make room, and run the same command with "
            "resume=true to write them"
        ) from error
