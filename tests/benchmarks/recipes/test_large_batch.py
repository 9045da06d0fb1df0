"""The grid of benchmarks/recipes/large_batch.py tunes as documented and resumes after a stop."""

import json
import math
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from benchmarks.recipes import large_batch, large_batch_report
from benchmarks.recipes.large_batch import ABLATIONS, SEEDS, Grid, Run, Runs
from benchmarks.recipes.large_batch_report import finals, grid_table, report
from benchmarks.recipes.large_batch_search import METHOD, tune
from benchmarks.recipes.large_batch_starts import GUESSES, HELD_OUT, WARMUP_EPOCHS, starts
from largebatch.pipeline import Synthetic
from largebatch.recipes.schema.load import load
from largebatch.recipes.tune.learning_rate.search import TOO_SHORT
from largebatch.recipes.tune.runs import Outcome, Reading

TRIALS = 4
BATCHES = (256, 2560, 4096)  # a part of the grid, so that the tests are quick
CELLS = large_batch.ORDER  # the whole grid, before a fixture reduces it


class FakeGrid(Grid):
    """A grid without training, whose best learning rate grows with the root of the batch size."""

    def __init__(self, path, max_tasks=math.inf, trials=TRIALS, pause=0, best_factor=1):
        super().__init__(Runs(path), "nowhere", trials, deadline=math.inf)
        self.made, self._max_tasks, self._pause = [], max_tasks, pause
        self._best_factor = best_factor

    def finish(self, task):
        time.sleep(self._pause)
        self._max_tasks -= 1
        if self._max_tasks <= 0:
            self._deadline = 0
        return super().finish(task)

    def _search(self, cell):
        found = starts(cell.optimizer, cell.batch_size)
        low, high = min(found)[0] / 2, 2 * max(found)[0]
        extra = range(1, self._trials - 2)
        found += [(low * (high / low) ** (i / self._trials), 8 * i / 9) for i in extra]
        return [
            {"lr": lr, "warmup_epochs": warmup, "method": "fake"}
            | self._train(Run("trial", cell.optimizer, cell.batch_size, lr, warmup))
            for lr, warmup in found[: self._trials]
        ]

    def _train(self, run):
        self.made.append(run)
        root = math.sqrt(run.batch_size / min(BATCHES))
        best = GUESSES[run.optimizer] * root * self._best_factor
        top1 = 80 - math.log2(run.lr / best) ** 2 - run.seed / 10 - (2 if run.variant else 0)
        return {
            "top1": top1, "diverged": False, "train_loss": 1.0, "steps": 7, "train_seconds": 9,
            "date": "2026-11-22",
        }  # fmt: skip

    def run_all(self):
        self.work()
        return self.made


@pytest.fixture(scope="module", autouse=True)
def smaller_grid():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_batch, "ORDER", tuple(c for c in large_batch.ORDER if c[1] in BATCHES))
        yield


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    path = tmp_path_factory.mktemp("grid") / "large_batch.json"
    return SimpleNamespace(path=path, made=FakeGrid(path).run_all())


def test_the_search_has_the_same_trials_and_starts_at_each_batch(tmp_path, monkeypatch):
    """With the real search, of runs that are not trained."""

    def measure(recipe, overrides, job, folder, watch=None, watch_training=None):
        trained.append(load(recipe, overrides).recipe)
        folder.mkdir(parents=True, exist_ok=True)
        reading = Reading(8, trained[-1].epochs, 1.0, 50 + len(trained))
        assert watch(reading) is None
        return Outcome("finished", (reading,), (), trained[-1].epochs, 1.0)

    module = "largebatch.recipes.tune.learning_rate.search"
    monkeypatch.setattr(f"{module}.measure", measure)
    monkeypatch.setattr(f"{module}.build_sources", lambda recipe: (Synthetic(45_000, 10), None))
    for optimizer, batch in (("lars", 256), ("nesterov", 2560)):
        trained, out = [], tmp_path / optimizer
        rows = tune(optimizer, batch, TRIALS, tmp_path, out)
        again = tune(optimizer, batch, TRIALS, tmp_path, out)
        assert again == rows
        assert len(trained) == len(rows) == TRIALS  # a search that is complete is not repeated
        assert {r.epochs for r in trained} == {20}
        assert {(r.batch_size, r.data.holdout, r.seed) for r in trained} == {(batch, HELD_OUT, 0)}
        assert {r.optimizer.name for r in trained} == {{"nesterov": "sgd"}.get(optimizer, "lars")}
        # The same multiples of the guess come first, with the same warm-up.
        ratio = batch / min(BATCHES)
        factors = [ratio, ratio**0.5, ratio**0.75] if ratio > 1 else [1, 0.5, 2]
        wanted = [GUESSES[optimizer] * factor for factor in factors]
        assert [r["lr"] for r in rows[:3]] == pytest.approx(wanted, rel=5e-3)
        assert {r["warmup_epochs"] for r in rows[:3]} == {WARMUP_EPOCHS}
        for recipe, row in zip(trained, rows, strict=True):
            assert min(wanted) / 2.1 < row["lr"] < 2.1 * max(wanted)
            assert 0 <= row["warmup_epochs"] <= 8
            assert row["method"] == METHOD
            # The final runs of a trial's row train as the trial did, on all images.
            run = Run("trial", optimizer, batch, row["lr"], row["warmup_epochs"])
            again = load(large_batch.RECIPES[optimizer], run.overrides()).recipe
            assert again.schedule == recipe.schedule
            assert again.optimizer == recipe.optimizer


def test_the_best_trial_is_trained_with_each_seed_on_all_images(complete):
    rows = json.loads(complete.path.read_text())["runs"]
    for optimizer in GUESSES:
        for batch in BATCHES:
            cell = [r for r in rows if (r["optimizer"], r["batch_size"]) == (optimizer, batch)]
            best = max((r for r in cell if r["kind"] == "trial"), key=lambda r: r["top1"])
            finals = [r for r in cell if r["kind"] == "final"]
            assert [r["seed"] for r in finals] == list(SEEDS)
            for key in ("lr", "warmup_epochs"):
                assert {r[key] for r in finals} == {best[key]}
    trial, final = (Run(kind, "lars", 4096, 16.0, 3) for kind in ("trial", "final"))
    assert set(trial.overrides()) - set(final.overrides()) == {"data.holdout=5000"}
    ablations = [r for r in complete.made if r.kind == "ablation"]
    assert len(ablations) == len(SEEDS) * len(ABLATIONS)
    assert {r.warmup_epochs for r in ablations if r.variant == "without warm-up"} == {0}


def test_threads_share_the_runs_and_wait_for_what_they_depend_on(tmp_path, complete):
    grid = FakeGrid(tmp_path / "large_batch.json", pause=0.01)
    grid.run(5)
    assert sorted(grid.made, key=repr) == sorted(complete.made, key=repr)


def test_a_failed_run_stops_the_other_threads_and_keeps_finished_runs(tmp_path):
    grid = FakeGrid(tmp_path / "large_batch.json", pause=0.01)
    finish, successes = grid.finish, iter(range(9))
    grid.finish = lambda task: finish(task) if next(successes, None) is not None else 1 / 0
    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(grid.work) for _ in range(3)]
    assert any(isinstance(worker.exception(), ZeroDivisionError) for worker in workers)
    assert json.loads((tmp_path / "large_batch.json").read_text())["runs"] == grid.runs.rows
    assert sorted(grid.made, key=repr) == sorted(
        (Run(**{k: row[k] for k in vars(grid.made[0])}) for row in grid.runs.rows), key=repr
    )


def test_time_that_ends_before_a_trial_leaves_the_search_to_the_next_call(tmp_path, monkeypatch):
    """The search then says so, with exit code 2."""
    asked = []

    def too_short(command):
        asked.append(command)
        time.sleep(2.5)
        return subprocess.CompletedProcess(command, 2, "", f"error: --minutes: {TOO_SHORT}\n")

    monkeypatch.setattr(large_batch, "_run", too_short)
    runs = Runs(tmp_path / "large_batch.json")
    Grid(runs, "nowhere", TRIALS, time.monotonic() + 2, tmp_path).work()
    assert (len(asked), runs.rows) == (1, [])


def test_rows_of_earlier_trials_name_their_method():
    methods = {
        row.get("method") for row in Runs(large_batch.RESULTS).rows if row["kind"] == "trial"
    }
    assert methods <= {METHOD, "starts, then Optuna's GPSampler"}


def test_recipes_of_runs_load():
    for variant in ("", *ABLATIONS):
        run = Run("ablation" if variant else "trial", "lars", 4096, 16.0, 3, 1, variant)
        recipe = load(large_batch.RECIPES["lars"], [*run.overrides(), *large_batch.PLAIN]).recipe
        assert (recipe.batch_size, recipe.optimizer.lr, recipe.seed) == (4096, 16.0, 1)
        assert recipe.optimizer.decay_bias_and_norm == (variant == "decay on bias and norm")
        assert recipe.model.zero_init_last_norm != (variant == "without zero gamma")


def test_recipes_have_the_tuned_values_and_state_the_measured_accuracy():
    rows = Runs(large_batch.RESULTS).rows
    cells = {(o, b): f for o, b in CELLS if len(f := finals(rows, o, b)) == len(SEEDS)}
    assert ("lars", 4096) in cells
    for (optimizer, batch_size), runs in cells.items():
        name = f"cifar10-{'' if optimizer == 'lars' else f'{optimizer}-'}b{batch_size}"
        run = Run("final", optimizer, batch_size, runs[0]["lr"], runs[0]["warmup_epochs"])
        loaded = load(name)
        trained = load(large_batch.RECIPES[optimizer], run.overrides()).recipe
        assert loaded.recipe == trained, name
        stated = re.search(r"Reaches (\S+) % top-1 on the test set; (\S+) to (\S+) ", loaded.head)
        assert stated, name
        mean, low, high = map(float, stated.groups())
        reached = [row["top1"] for row in runs]
        assert (low, high) == (min(reached), max(reached)), name
        assert mean == pytest.approx(sum(reached) / len(reached), abs=0.051), name


def test_a_stopped_grid_resumes_with_the_missing_runs(tmp_path, complete):
    path = tmp_path / "large_batch.json"
    made = []
    for _ in range(40):
        made += (now := FakeGrid(path, max_tasks=15).run_all())
        if not now:
            break
    assert sorted(made, key=repr) == sorted(complete.made, key=repr)


def test_the_report_shows_means_and_whether_the_goals_are_met(complete):
    text = report(complete.path)
    assert "| 4,096 | LARS |" in text
    assert text.count("± 0.10") >= len(GUESSES) * len(BATCHES)
    assert "Goal: LARS at 2,560 within 0.5 points" in text
    assert "| without zero gamma |" in text
    assert "-2.00 |" in text
    assert complete.path.with_suffix(".png").stat().st_size > 10_000


def test_more_trials_replace_values_tuned_with_fewer(tmp_path):
    path = tmp_path / "large_batch.json"
    FakeGrid(path, trials=3, best_factor=1.2).run_all()
    rows = Runs(path).rows
    grid = FakeGrid(path, trials=5, best_factor=1.2)
    grid.run_all()
    assert grid.runs.rows[: len(rows)] == rows
    cells = len(GUESSES) * len(BATCHES)
    kinds = [r["kind"] for r in grid.runs.rows]
    assert kinds.count("trial") == 5 * cells  # those with the same settings are not added again
    assert kinds.count("final") > len(SEEDS) * cells
    after = grid_table(grid.runs.rows)
    assert after != grid_table(rows)
    assert "seeds)" not in after


def test_the_report_of_an_unfinished_grid_shows_only_what_was_run(tmp_path, monkeypatch):
    monkeypatch.setattr(large_batch_report, "draw", lambda rows, path: None)
    FakeGrid(tmp_path / "large_batch.json", max_tasks=3).run_all()
    text = report(tmp_path / "large_batch.json")
    assert "(2 seeds)" in text
    assert "Goal" not in text
    assert "| 4,096 | LARS |" in text
    assert "| 256 |" not in text
