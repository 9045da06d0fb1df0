"""Scripts that train for long write the stored tables again from the stored runs.

What is published of these runs elsewhere, in recipes and in README.md, is held to them, too.
"""

import json
import re
import shutil
import statistics
from pathlib import Path

import pytest
import typer.main

from benchmarks.recipes import (
    epochs_to_target,
    larger_batch,
    main_job,
    muon_limits,
    plan_memory,
    tune_lr,
)
from benchmarks.recipes.epochs_to_target_estimates import finals
from benchmarks.tables import RESULTS
from largebatch.recipes.commands.tree import app
from largebatch.recipes.schema.load import load
from largebatch.recipes.schema.names import recipe_names

ROOT = Path(__file__).parents[3]


def content_of(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_searches_by_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(tune_lr, "measure", lambda *_: None)
    copy = shutil.copy(RESULTS / "tune_lr.json", tmp_path)
    tune_lr.main(["digits", "--data", "nowhere", "--results", str(copy)])
    assert (tmp_path / "tune_lr.md").read_text() == (RESULTS / "tune_lr.md").read_text()


def test_the_options_of_tune_lr_are_those_of_the_command():
    command = typer.main.get_command(app).commands["tune"].commands["lr"]
    known = {option for parameter in command.params for option in parameter.opts}
    given = {a for case in tune_lr.CASES.values() for a in case.budget if a.startswith("--")}
    assert given | {"--nproc", "--out"} <= known


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("larger_batch", lambda content: larger_batch.table(content["top1"])),
        ("main_job", lambda content: main_job.table(content["runs"])),
        ("muon_limits", lambda content: muon_limits.table(content["runs"])),
        ("plan_memory", lambda content: plan_memory.table(content["rows"])),
    ],
)
def test_measurements(name, table):
    written = table(content_of(name)).splitlines()
    rows = [line for line in written if line.startswith("|")]
    stored = (RESULTS / f"{name}.md").read_text(encoding="utf-8").splitlines()
    assert rows == [line for line in stored if line.startswith("|")]


def test_the_stored_tables_have_the_overview_of_the_grid_and_the_readme_a_line(
    tmp_path, monkeypatch, capsys
):
    stored = RESULTS / "epochs_to_target.json"
    monkeypatch.setattr(epochs_to_target, "RESULT", Path(shutil.copy(stored, tmp_path)))
    monkeypatch.setattr("sys.argv", ["epochs_to_target"])
    epochs_to_target.main()
    table, _, line = capsys.readouterr().out.strip().rpartition("\n")
    assert table in stored.with_suffix(".md").read_text(encoding="utf-8")
    assert line in (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("epochs_to_target.png", "epochs_at_ten_times.png"):
        assert (tmp_path / name).stat().st_size > 10_000


#: Names in the results by that of an optimizer in the names of recipes.
STORED = {"nesterov": "Nesterov-1x", "lars": "LARS", "muon": "Muon", "lamb": "LAMB"}
COUNTS = ("no", "one", "two", "three", "four", "five")


def tuned_recipes(network):
    """Return the recipes that a grid trained, with their optimizer and batch size."""
    pattern = rf"{network}-(?:(\w+)-)?b(\d+)"
    found = ((name, re.fullmatch(pattern, name)) for name in recipe_names())
    return [(name, m[1] or "lars", int(m[2])) for name, m in found if m and name != "airbench-b256"]


def said_of(rows):
    top1 = sorted(row["top1"] for row in rows)
    seeds = f"; {top1[0]:.2f} to {top1[-1]:.2f} with {COUNTS[len(top1)]} seeds"
    seeds = seeds if len(top1) > 1 else ", with one seed"
    return f"Reaches {statistics.mean(top1):.1f} % top-1 on the test set{seeds}, as stored in "


@pytest.mark.parametrize(("name", "optimizer", "batch_size"), tuned_recipes("airbench"))
def test_a_tuned_recipe_has_what_a_search_found_and_says_what_it_reached(
    name, optimizer, batch_size
):
    cell, content = (STORED[optimizer], batch_size), content_of("epochs_to_target")
    (best,) = (s["best"] for s in content["searches"] if (s["optimizer"], s["batch_size"]) == cell)
    loaded = load(name)
    recipe = loaded.recipe
    assert (recipe.batch_size, recipe.epochs) == (batch_size, content["epochs"])
    assert (recipe.optimizer.lr, recipe.schedule.power) == (best["lr"], best["power"])
    assert str(recipe.schedule.warmup) == f"{best['warmup']:g}dur"
    assert recipe.optimizer.momentum == best.get("momentum", recipe.optimizer.momentum)
    assert said_of(finals(content["runs"], *cell, content["epochs"])) in " ".join(
        loaded.head.split()
    )


@pytest.mark.parametrize(("name", "optimizer", "batch_size"), tuned_recipes("cifar10"))
def test_a_recipe_for_resnet9_has_what_was_trained_and_says_what_it_reached(
    name, optimizer, batch_size
):
    runs = [
        row
        for row in content_of("large_batch")["runs"]
        if (row["kind"], row["optimizer"], row["batch_size"]) == ("final", optimizer, batch_size)
    ]
    loaded = load(name)
    if not runs:
        assert "top-1 on the test set" not in loaded.head
        return
    recipe = loaded.recipe
    assert (recipe.batch_size, recipe.optimizer.lr) == (batch_size, runs[0]["lr"])
    assert str(recipe.schedule.warmup) == f"{runs[0]['warmup_epochs']:g}ep"
    stated = re.search(r"Reaches (\S+) % top-1 on the test set; (\S+) to (\S+) ", loaded.head)
    mean, low, high = map(float, stated.groups())
    reached = [row["top1"] for row in runs]
    assert (low, high) == (min(reached), max(reached))
    assert mean == pytest.approx(statistics.mean(reached), abs=0.051)
