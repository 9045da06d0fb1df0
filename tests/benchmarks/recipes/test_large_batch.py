"""The grid of benchmarks/recipes/large_batch.py tunes as documented and resumes after a stop."""

import json
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from benchmarks.recipes import large_batch
from benchmarks.recipes.large_batch import ABLATIONS, SEEDS, Grid, Run, Runs
from benchmarks.recipes.large_batch_report import finals, report
from benchmarks.recipes.large_batch_starts import GUESSES, WARMUP_EPOCHS
from largebatch.recipes.schema.load import load

TRIALS = 4
BATCHES = (256, 2560, 4096)  # a part of the grid, so that the tests are quick
CELLS = large_batch.ORDER  # the whole grid, before a fixture reduces it


class FakeGrid(Grid):
    """A grid without training, whose best learning rate grows with the root of the batch size."""

    def __init__(self, path, max_runs=math.inf, trials=TRIALS, pause=0, best_factor=1):
        super().__init__(Runs(path), "nowhere", trials, deadline=math.inf)
        self.made, self._max_runs, self._pause = [], max_runs, pause
        self._best_factor = best_factor

    def _train(self, run):
        self.made.append(run)
        time.sleep(self._pause)
        if len(self.made) >= self._max_runs:
            self._deadline = 0
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


def test_all_optimizers_get_the_same_trials_at_each_batch(complete):
    assert len(complete.made) == len(set(complete.made))
    for batch in BATCHES:
        tried = {o: [r for r in complete.made if (r.kind, r.optimizer, r.batch_size) ==
                     ("trial", o, batch)] for o in GUESSES}  # fmt: skip
        assert {len(t) for t in tried.values()} == {TRIALS}
        # The same multiples of the guess come first, with the same warm-up.
        for optimizer, runs in tried.items():
            ratio = batch / min(BATCHES)
            powers = [1, 0.5, 0.75]
            factors = [ratio**p for p in powers] if ratio > 1 else [1, 0.5, 2]
            wanted = [GUESSES[optimizer] * factor for factor in factors]
            assert [r.lr for r in runs[:3]] == pytest.approx(wanted, rel=5e-3)
            assert {r.warmup_epochs for r in runs[:3]} == {WARMUP_EPOCHS}
            assert all(min(wanted) / 2.1 < r.lr < 2.1 * max(wanted) for r in runs)
            assert all(1 <= r.warmup_epochs <= 8 for r in runs)


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
    with ThreadPoolExecutor(5) as pool:
        for worker in [pool.submit(grid.work) for _ in range(5)]:
            worker.result()
    assert sorted(grid.made, key=repr) == sorted(complete.made, key=repr)


def test_a_failed_run_stops_the_other_threads_and_keeps_finished_runs(tmp_path):
    grid = FakeGrid(tmp_path / "large_batch.json", pause=0.01)
    train, successes = grid._train, iter(range(9))
    grid._train = lambda run: train(run) if next(successes, None) is not None else 1 / 0
    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(grid.work) for _ in range(3)]
    assert any(isinstance(worker.exception(), ZeroDivisionError) for worker in workers)
    assert len(json.loads((tmp_path / "large_batch.json").read_text())["runs"]) == 9


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
        made += (now := FakeGrid(path, max_runs=7).run_all())
        if not now:
            break
    assert sorted(made, key=repr) == sorted(complete.made, key=repr)
    # With more trials, those that have finished are kept.
    more = FakeGrid(path, trials=TRIALS + 1).run_all()
    assert [r.kind for r in more].count("trial") == len(GUESSES) * len(BATCHES)


def test_the_report_shows_means_and_whether_the_goals_are_met(complete):
    text = report(complete.path)
    assert "| 4,096 | LARS |" in text
    assert text.count("± 0.10") >= len(GUESSES) * len(BATCHES)
    assert "Goal: LARS at 2,560 within 0.5 points" in text
    assert "| without zero gamma |" in text
    assert "-2.00 |" in text
    assert complete.path.with_suffix(".png").stat().st_size > 10_000


def test_more_trials_replace_values_tuned_with_fewer(tmp_path):
    FakeGrid(tmp_path / "large_batch.json", trials=3, best_factor=1.2).run_all()
    before = report(tmp_path / "large_batch.json")
    grid = FakeGrid(tmp_path / "large_batch.json", trials=5, best_factor=1.2)
    grid.run_all()
    finals = [r for r in grid.runs.rows if r["kind"] == "final"]
    assert len(finals) > len(SEEDS) * len(GUESSES) * len(BATCHES)
    after = report(tmp_path / "large_batch.json")
    assert after != before
    assert "seeds)" not in after


def test_the_report_of_an_unfinished_grid_shows_only_what_was_run(tmp_path):
    FakeGrid(tmp_path / "large_batch.json", max_runs=6).run_all()
    text = report(tmp_path / "large_batch.json")
    assert "(2 seeds)" in text
    assert "Goal" not in text
    assert "| 4,096 | LARS |" in text
    assert "| 256 |" not in text
