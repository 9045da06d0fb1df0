"""The command ``largebatch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ... import __version__
from .comm import comm_app
from .data import data_app
from .launch import torchrun
from .options import Overrides, RecipeName

# What a command needs beyond this is imported when it runs, so that help is there at once.

app = typer.Typer(
    name="largebatch",
    help="Train ImageNet models at very large batch sizes.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
recipes_app = typer.Typer(help="List the recipes, or show one.", rich_markup_mode=None)
app.add_typer(recipes_app, name="recipes")
tune_app = typer.Typer(
    help="Find settings for a recipe.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(data_app, name="data")
app.add_typer(tune_app, name="tune")
app.add_typer(comm_app, name="comm")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"largebatch {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    nproc: Annotated[
        int, typer.Option(min=1, help="Processes on this machine, started with torchrun.")
    ] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint (resume=true).")
    ] = False,
) -> None:
    """Train a recipe on this machine.

    For several machines, start the trainer with torchrun on each of them:

    \b
    torchrun --nnodes N --nproc-per-node GPUS --max-restarts 3
        --rdzv-backend c10d --rdzv-endpoint HOST:PORT
        -m largebatch.recipes.train RECIPE [KEY=VALUE]...

    HOST is one of them. A restarted rank goes on from the last checkpoint with resume=true.
    """
    from ..errors import exit_on_user_error
    from ..schema.load import load
    from ..train import check
    from ..train import train as train_here

    values = [*(overrides or []), *(["resume=true"] if resume else [])]
    with exit_on_user_error():
        loaded = load(recipe, values)
        if nproc == 1:
            train_here(loaded)
            return
        check(loaded, nproc)  # what is wrong is told here, not by each process
    torchrun(nproc, "largebatch.recipes.train", [recipe, *values])


@recipes_app.callback(invoke_without_command=True)
def _list(context: typer.Context) -> None:
    """List the recipes, or show one."""
    if context.invoked_subcommand is not None:
        return
    from ..schema.catalogue import entries

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # whole lines for a file or a pipe
    wide = console.width >= 140
    table = Table(box=None, pad_edge=False)
    for column in ("recipe", "optimizer"):
        table.add_column(column, no_wrap=True)
    for column in ("batch", "lr", "warm-up", "epochs"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("what it is", "to be reached")[: 1 + wide]:
        table.add_column(column)
    for entry in entries():
        recipe = entry.recipe
        told = (
            entry.name,
            recipe.optimizer.name,
            f"{recipe.batch_size:,}",
            f"{recipe.optimizer.lr:g}",
            str(recipe.schedule.warmup),
            f"{recipe.epochs:g}",
            entry.what,
            entry.reaches,
        )
        table.add_row(*told[: len(table.columns)])
    console.print(table)


@recipes_app.command()
def show(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Print a recipe with every key, what it extends and overrides resolved."""
    from ..errors import exit_on_user_error
    from ..schema.load import dump, load

    with exit_on_user_error():
        loaded = load(recipe, overrides or [])
    print("\n".join(f"# {s}".rstrip() for s in (*loaded.head.splitlines(), *loaded.notices)))
    print(dump(loaded.recipe), end="")


@app.command()
def schedule(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Picture to write: .png, .svg or .pdf.")
    ] = Path("schedule.png"),
) -> None:
    """Plot a recipe's learning rate, and print its key points.

    Images are counted in the data folder; where it is not there, data.train_images says how many
    there are. A step is the number of updates already made.
    """
    from ..errors import exit_on_user_error
    from ..predict.schedule import draw, outline, print_summary
    from ..schema.load import load

    with exit_on_user_error():
        found = outline(load(recipe, overrides or []))
        draw(found, out)
    print_summary(found)
    print(out)


@tune_app.command("precision")
def _precision(
    recipe: RecipeName,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates to watch.")] = 20,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for underflow.png and underflow.json.")
    ] = Path("underflow"),
) -> None:
    """Find the loss scale that FP16 needs.

    Trains the first steps of a recipe in FP32 on this process, without keeping the run, and counts
    which gradients and updates FP16 would flush to zero, layer by layer. Gradients shrink as
    training goes on: resume=PATH watches from a checkpoint.
    """
    from ..errors import exit_on_user_error
    from ..tune.precision import make_folder, print_summary, tune_precision, write

    with exit_on_user_error():
        make_folder(out)
        found = tune_precision(recipe, overrides or [], steps)
        written = write(found, out)
    print_summary(found)
    for path in written:
        print(path)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")],
) -> None:
    """Draw a run's report.png from its metrics."""
    from ..errors import exit_on_user_error
    from ..training.report import write_report

    with exit_on_user_error():
        print(write_report(run_dir))


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
