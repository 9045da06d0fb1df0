"""Scripts of benchmarks/recipes that measure run at a small size."""

import typer.main

from benchmarks.recipes import tune_lr
from largebatch.recipes.commands.tree import app


def test_the_options_of_tune_lr_are_those_of_the_command():
    command = typer.main.get_command(app).commands["tune"].commands["lr"]
    known = {option for parameter in command.params for option in parameter.opts}
    given = {a for case in tune_lr.CASES.values() for a in case.budget if a.startswith("--")}
    assert given | {"--nproc", "--out"} <= known
