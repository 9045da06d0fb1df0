"""Scripts that train for long write the stored tables again from the stored runs.

What is published of these runs elsewhere, in recipes and in README.md, is held to them, too.
"""

import json
import re
import shutil
import statistics
from pathlib import Path

import pytest

from benchmarks.airbench_optimizers import RECIPE
from benchmarks.amp import precision
from benchmarks.recipes import (
    ablations,
    batch_price,
    constant_rate,
    critical_batch,
    epochs_to_target,
    large_batch,
    large_batch_tried,
    large_batch_trust,
    lr_range,
    main_job,
    plan_memory,
    search_rivals,
    small_network,
    step_meters,
    tune_lr,
    untuned,
)
from benchmarks.recipes.epochs_to_target_estimates import finals, target_of
from benchmarks.recipes.epochs_to_target_report import overview
from benchmarks.recipes.large_batch_report import finals as finals_of_large_batch
from benchmarks.tables import RESULTS
from largebatch.recipes.schema.load import load
from largebatch.recipes.schema.names import recipe_names

ROOT = Path(__file__).parents[3]

#: Scripts that train what is missing.
SINGLES = (ablations, batch_price, constant_rate, large_batch_tried, large_batch_trust)
SINGLES += (search_rivals, small_network, untuned)


def content_of(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def lines_of(path):
    """Return the lines of a table but the last, which has a machine and its packages."""
    return path.read_text(encoding="utf-8").splitlines()[:-1]


def short(module):
    return module.__name__.rpartition(".")[2]


@pytest.fixture
def rewrite(tmp_path, monkeypatch):
    """Return a function that runs a script on a copy of its results, and returns its tables."""

    def run(module, *options):
        name, constant = short(module), "RESULT" if hasattr(module, "RESULT") else "RESULTS"
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
        monkeypatch.setattr(module, constant, tmp_path / f"{name}.json")
        monkeypatch.setattr("sys.argv", [name, "--data", "nowhere", *options])
        module.main()
        expected = {path.name for path in RESULTS.glob(f"{name}.*")}
        assert {path.name for path in tmp_path.iterdir()} >= expected
        return sorted(tmp_path.glob("*.md"))

    return run


@pytest.mark.parametrize("module", SINGLES, ids=short)
def test_single_runs(module, rewrite, monkeypatch):
    stored = content_of(short(module))["runs"]
    monkeypatch.setattr(module, "run_missing", lambda *_: stored)
    (table,) = rewrite(module)
    assert len(lines_of(table)) > 3
    assert lines_of(table) == lines_of(RESULTS / table.name)


@pytest.mark.parametrize("module", [epochs_to_target, large_batch], ids=short)
def test_grids_without_time_for_another_run(module, rewrite):
    for table in rewrite(module, "--minutes", "0"):
        assert table.read_text() == (RESULTS / table.name).read_text()


def test_searches_by_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(tune_lr, "measure", lambda *_: None)
    copy = shutil.copy(RESULTS / "tune_lr.json", tmp_path)
    tune_lr.main(["digits", "--data", "nowhere", "--results", str(copy)])
    assert (tmp_path / "tune_lr.md").read_text() == (RESULTS / "tune_lr.md").read_text()


def test_range_tests(tmp_path):
    written = lr_range.report(Path(shutil.copy(RESULTS / "lr_range.json", tmp_path)))
    assert written == (RESULTS / "lr_range.md").read_text()


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("critical_batch", critical_batch.table),
        ("main_job", lambda content: main_job.table(content["runs"])),
        ("plan_memory", lambda content: plan_memory.table(content["rows"])),
        ("step_meters", lambda content: step_meters.table(content["rows"])),
        ("precision", lambda content: precision.accuracy_table(content["runs"])),
        ("precision_flushed", lambda content: precision.flushed_table(content["flushed"])),
        ("precision_bytes", lambda content: precision.bytes_table(content["bytes_per_parameter"])),
    ],
)
def test_measurements(name, table):
    written = table(content_of(re.sub("_(flushed|bytes)", "", name))).splitlines()
    rows = [line for line in written if line.startswith("|")]
    stored = (RESULTS / f"{name}.md").read_text(encoding="utf-8").splitlines()
    assert rows == [line for line in stored if line.startswith("|")]


def test_the_readme_has_the_overview_of_the_grid():
    content = content_of("epochs_to_target")
    table = overview(content["runs"], target_of(content["runs"], content["epochs"]))
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")


#: The optimizers of the recipes with tuned settings, by their part of the recipe's name.
TUNED = {"nesterov": "Nesterov-1x", "lars": "LARS", "muon": "Muon", "lamb": "LAMB"}
COUNTS = (*("no", "one", "two", "three", "four"), *("five", "six", "seven", "eight"))


@pytest.mark.parametrize("name", [n for n in recipe_names() if re.match(r"airbench-\w+-", n)])
def test_a_tuned_recipe_is_what_was_trained_and_says_what_it_reached(name):
    kind, batch_size = re.fullmatch(r"airbench-(\w+)-b(\d+)", name).groups()
    cell, content = (TUNED[kind], int(batch_size)), content_of("epochs_to_target")
    (best,) = (s["best"] for s in content["searches"] if (s["optimizer"], s["batch_size"]) == cell)
    loaded, run = load(name), epochs_to_target.Run(*cell, epochs_to_target.EPOCHS, seed=0)
    assert loaded.recipe == load(RECIPE, run.overrides(best)).recipe
    top1 = sorted(r["top1"] for r in finals(content["runs"], *cell, epochs_to_target.EPOCHS))
    seeds = f"; {top1[0]:.2f} to {top1[-1]:.2f} with {COUNTS[len(top1)]} seeds"
    said = f"Reaches {statistics.mean(top1):.1f} % top-1 on the test set"
    said += f"{seeds if len(top1) > 1 else ', with one seed'}, as trained by "
    assert said in " ".join(loaded.head.split())


def test_recipes_for_resnet9_are_what_was_trained_and_say_what_they_reached():
    rows = large_batch.Runs(large_batch.RESULTS).rows
    cells = {(o, b): finals_of_large_batch(rows, o, b) for o, b in large_batch.ORDER}
    cells = {cell: runs for cell, runs in cells.items() if len(runs) == len(large_batch.SEEDS)}
    assert ("lars", 4096) in cells
    for (optimizer, batch_size), runs in cells.items():
        name = f"cifar10-{'' if optimizer == 'lars' else f'{optimizer}-'}b{batch_size}"
        tuned = runs[0]["lr"], runs[0]["warmup_epochs"]
        run = large_batch.Run("final", optimizer, batch_size, *tuned)
        loaded = load(name)
        trained = load(large_batch.RECIPES[optimizer], run.overrides()).recipe
        assert loaded.recipe == trained, name
        stated = re.search(r"Reaches (\S+) % top-1 on the test set; (\S+) to (\S+) ", loaded.head)
        mean, low, high = map(float, stated.groups())
        reached = [row["top1"] for row in runs]
        assert (low, high) == (min(reached), max(reached)), name
        assert mean == pytest.approx(statistics.mean(reached), abs=0.051), name
