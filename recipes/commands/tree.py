"""The groups and commands of ``largebatch``, put together."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ... import __version__
from ..errors import exit_on_user_error
from .comm_simulate import comm_simulate
from .comm_tune import comm_tune
from .critical_batch import critical_batch
from .data_check import data_check
from .data_index import data_index
from .evaluate import evaluate
from .export import export
from .plan import plan
from .prepare import data_prepare
from .recipes import recipes_app
from .report import report
from .runs import runs
from .schedule import schedule
from .train import train
from .tune import tune_precision
from .tune_lr import tune_lr

# Commands import what they need when they run, so that help and completion do not load torch.


class _Commands(typer.core.TyperGroup):
    """All commands; a mistake of the user in any of them is one line."""

    def invoke(self, ctx: Any) -> Any:
        with exit_on_user_error():
            return super().invoke(ctx)


def _group(help_text: str) -> typer.Typer:
    return typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)


app = typer.Typer(
    name="largebatch",
    cls=_Commands,
    help="Train ImageNet models at very large batch sizes.\n\n"
    "A first run, on two CPU cores in about two minutes:\n\n"
    "\b\n"
    "  largebatch data prepare digits --out data/digits\n"
    "  largebatch train digits --nproc 2",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
data_app = _group("Prepare, check and index data sets.")
tune_app = _group("Find good settings for a recipe.")
comm_app = _group("Measure all-reduces here, or predict them on a cluster.")

for command in (train, evaluate, export, runs, report, plan, schedule):
    app.command()(command)
app.add_typer(recipes_app, name="recipes")
app.add_typer(data_app, name="data")
app.add_typer(tune_app, name="tune")
app.add_typer(comm_app, name="comm")
data_app.command("prepare")(data_prepare)
data_app.command("check")(data_check)
data_app.command("index")(data_index)
tune_app.command("lr")(tune_lr)
tune_app.command("precision")(tune_precision)
app.command("critical-batch")(critical_batch)
comm_app.command("tune")(comm_tune)
comm_app.command("simulate")(comm_simulate)


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
