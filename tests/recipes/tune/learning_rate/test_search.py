"""The search as a whole: what it finds, writes and resumes, and what it refuses.

Runs are computed (see fakes.py), with a clock of their own.
"""

import json
import math
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from PIL import Image

from largebatch.recipes.errors import AgreedError, RecipeError
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.folder.lock import locked
from largebatch.recipes.tune.learning_rate import report
from largebatch.recipes.tune.learning_rate.study import JOURNAL
from tests.ranks import CONTEXT, run_ranks
from tests.recipes.tune.learning_rate.fakes import FakeRuns, run


def states(found, stage="coarse"):
    return [t.state for t in found.trials if t.stage == stage]


def tried(found):
    return [(t.stage, t.seed, *t.settings) for t in found.trials if t.counts]


def stop_at(number, part):
    """A run that ends by a signal."""

    def fail(made, reading):
        if (made, reading) == (number, part):
            raise SystemExit(143)

    return fail


@pytest.fixture(scope="module")
def study(photos, tmp_path_factory):
    """A search with a fine stage, its folder, and its runs."""
    out = tmp_path_factory.mktemp("study")
    return *run(photos, out, "seed=3", "optimizer.lr=40"), out


@pytest.mark.parametrize(("factor", "runs"), [(10, 8.0), (0.1, 16.0)])
def test_the_best_settings_are_found_from_a_rate_ten_times_off(photos, tmp_path, factor, runs):
    off = [f"optimizer.lr={4 * factor}", "schedule.warmup=0"]
    found, fakes = run(photos, tmp_path, *off, runs=runs)
    assert sum(t.epochs for t in found.trials) <= runs * 40
    assert found.best.stage == "fine"
    assert 4 / 1.3 < found.best.lr < 4 * 1.3
    assert {r.data.holdout for r in fakes.made} == {13}
    # The first trial has the recipe's own values; coarse trials are shorter.
    assert fakes.made[0].optimizer.lr == 4 * factor
    assert fakes.made[0].schedule.warmup.value == 0
    assert fakes.made[0].epochs < 0.5 * fakes.made[-1].epochs <= 20
    # The best rate has been compared with its neighbours, and has a second seed.
    rates = [r.optimizer.lr for r in fakes.made if r.epochs == fakes.made[-1].epochs]
    for ratio in (2 / 3, 3 / 2):
        assert any(rate == pytest.approx(found.best.lr * ratio, 0.02) for rate in rates)
    assert sum(t.seed for t in found.trials) == 2
    assert {r.seed for r in fakes.made} == {0, 1}


def search_on_a_rank(photos, out):
    lines, job = [], Job(dist.get_rank(), 2, 2, torch.device("cpu"))
    found, fakes = run(photos, out, "optimizer.lr=40", job=job, say=lines.append)
    clocks = FakeRuns(start=5.0 + dist.get_rank())  # which differ by rank
    _, timed = run(photos, out / "timed", fakes=clocks, job=job, minutes=3.0)
    made = [(r.optimizer.lr, r.epochs) for r in (*fakes.made, *timed.made)]
    return found, made, lines


def test_ranks_make_the_same_trials_and_one_of_them_speaks(photos, tmp_path):
    (first, made, lines), (second, same, none) = run_ranks(2, search_on_a_rank, photos, tmp_path)
    assert (first, made) == (second, same)
    assert len(lines) == 1 + len(first.trials) < len(made)
    assert none == []
    assert "pruned" in states(first)  # which rank 0 alone decides


def test_each_trial_ends_for_the_reason_that_is_given(photos, tmp_path):
    """Pruned is behind others, and diverged is not finite: a high loss alone is neither."""
    lines = []
    fakes = FakeRuns(loss=lambda top1: 50.0)
    found, _ = run(photos, tmp_path, "optimizer.lr=40", fakes=fakes, runs=16.0, say=lines.append)
    coarse = [t for t in found.trials if t.stage == "coarse"]
    by_state = {state: [t for t in coarse if t.state == state] for state in states(found)}
    assert all(t.lr > 40 for t in by_state["diverged"])
    assert all(t.lr <= 40 for t in by_state["finished"])
    longest = max(t.epochs for t in coarse)
    for trial in by_state["pruned"]:
        assert 0.4 * longest < trial.epochs < longest
        others = [t.top1 for t in by_state["finished"] if t.number < trial.number]
        assert trial.top1 < sorted(others)[len(others) // 2]
    assert not {"pruned", "out of time"} & {*states(found, "fine")}
    assert sum(": diverged" in line for line in lines) == states(found).count("diverged")


def test_a_search_goes_on_as_if_it_had_not_ended_and_repeats_nothing(photos, tmp_path):
    whole, _ = run(photos, tmp_path / "whole", runs=30.0)
    for number in (2, 29, 3):  # in the coarse stage and in the fine one
        with pytest.raises(SystemExit):
            run(photos, tmp_path / "parts", fakes=FakeRuns(fail=stop_at(number, 2)), runs=30.0)
    assert not list((tmp_path / "parts").glob("trials/*/checkpoints"))
    parts, _ = run(photos, tmp_path / "parts", runs=30.0)
    assert sum(t.state == "interrupted" for t in parts.trials) == 3
    assert tried(parts) == tried(whole)
    assert len({*tried(whole)}) == len(tried(whole))
    again, none = run(photos, tmp_path / "whole", runs=30.0)
    assert (again, none.made) == (whole, [])


def test_the_best_so_far_is_written_whatever_ends_the_search(photos, tmp_path):
    """By a signal in the first trial; by one that comes too late to stop a trial; by a kill."""
    with pytest.raises(SystemExit):
        run(photos, tmp_path / "first", "optimizer.lr=2", fakes=FakeRuns(fail=stop_at(1, 3)))
    assert load(str(tmp_path / "first" / "recipe.yaml")).recipe.optimizer.lr == 2
    best = json.loads((tmp_path / "first" / "trials.json").read_text())["best"]
    assert (best["state"], best["lr"]) == ("interrupted", 2)

    class Late(FakeRuns):
        def __call__(self, *arguments):
            return replace(super().__call__(*arguments), signal=2)

    with pytest.raises(SystemExit) as ended:
        run(photos, tmp_path / "late", fakes=Late())
    assert ended.value.code == 130
    assert load(str(tmp_path / "late" / "recipe.yaml")).recipe.optimizer.lr == 1
    killed = CONTEXT.Process(target=search_that_is_killed, args=(photos, tmp_path / "killed"))
    killed.start()
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    assert load(str(tmp_path / "killed" / "recipe.yaml")).recipe.optimizer.lr == 1
    found, _ = run(photos, tmp_path / "killed")
    assert [t.state for t in found.trials][:3] == ["finished", "interrupted", "finished"]
    assert found.trials[1].settings == found.trials[2].settings


def search_that_is_killed(photos, out):
    def fail(number, part):
        if (number, part) == (2, 2):
            os.kill(os.getpid(), signal.SIGKILL)

    run(photos, out, fakes=FakeRuns(fail=fail))


# --- minutes ------------------------------------------------------------------------------------


def test_trials_are_fitted_to_the_minutes(photos, tmp_path):
    """A start takes 5 s here, and an epoch 1 s: 45 s for the whole recipe."""
    lines, fakes = [], FakeRuns(start=5.0)
    found, _ = run(photos, tmp_path, fakes=fakes, minutes=3.0, say=lines.append)
    assert fakes.now - 100 <= 180
    assert fakes.now - 100 > 120
    assert found.best.stage == "fine"
    assert found.best.epochs < 20  # the whole recipe does not fit seven times
    assert lines[0].startswith("timing ")
    assert "fit into" in lines[1]
    assert "of the recipe's 40 epochs, as more did not fit" in " ".join(report.summary(found))
    with pytest.raises(RecipeError, match=r"--minutes: 0.5 is too little: .* valid: at least 1\."):
        run(photos, tmp_path / "small", fakes=(small := FakeRuns(start=5.0)), minutes=0.5)
    assert small.made == []
    assert small.now - 100 < 15  # refused as soon as a step is timed


def test_a_study_of_minutes_goes_on_with_lengths_as_they_were(photos, tmp_path):
    fakes = FakeRuns(start=5.0, fail=stop_at(3, 2))
    with pytest.raises(SystemExit):
        run(photos, tmp_path, fakes=fakes, minutes=3.0)
    found, more = run(photos, tmp_path, fakes=FakeRuns(start=5.0), minutes=6.0)
    assert {r.epochs for r in fakes.made} <= {r.epochs for r in more.made}
    assert len({r.epochs for r in more.made}) == 2
    assert found.best.stage == "fine"


def test_trials_that_take_longer_than_expected_leave_the_best_so_far(photos, tmp_path):
    def slower(number, part):
        fakes.slow = 100.0 if number == 2 else 1.0

    fakes = FakeRuns(fail=slower)
    found, _ = run(photos, tmp_path, "optimizer.lr=2", fakes=fakes, minutes=3.0)
    assert [t.state for t in found.trials] == ["finished", "out of time"]
    assert found.best == found.trials[0]
    assert (tmp_path / "recipe.yaml").exists()
    assert "rates nearby are not compared" in " ".join(report.summary(found))


# --- what is refused ----------------------------------------------------------------------------


def test_the_study_of_another_recipe_or_range_is_refused_and_an_older_one_continued(
    study, photos, tmp_path
):
    out, keys = study[-1], ["seed=3", "optimizer.lr=40"]
    for overrides, options, words in (
        (["label_smoothing=0.2"], {}, "recipe.label_smoothing is now 0.2, was 0.1"),
        ([], {"lr": (1.0, 2.0)}, "ranges.lr is now [1.0, 2.0]"),
        (["data.holdout=14"], {}, "recipe.data.holdout is now 14, was 13"),
    ):
        with pytest.raises(RecipeError, match="holds another study") as caught:
            run(photos, out, *keys, *overrides, **options)
        assert words in str(caught.value)
        assert str(caught.value).endswith("valid: another folder")
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    journal = tmp_path / JOURNAL
    older = journal.read_text().replace('"verify":"decode",', "")
    assert older != journal.read_text()
    journal.write_text(older)
    with pytest.raises(RecipeError, match='verify is now "strict", was "decode"'):
        run(photos, tmp_path, *keys, "data.verify=strict")
    for folder in (out, tmp_path):
        _, fakes = run(photos, folder, *keys, "run_dir=elsewhere")  # is no other recipe
        assert fakes.made == []


def test_what_cannot_be_searched_is_refused_before_anything_is_written(photos, tmp_path):
    for override, minutes, message in (
        ("seed=0", math.nan, "--minutes: nan is no budget"),
        ("data={source: synthetic, holdout: null}", 1, "data.source: synthetic images have"),
        ("batch_size=4096", 1, "batch_size: 4096 is too large for a run"),
        ("resume=true", 1, "resume: trials start anew"),
        ("data.path=nowhere", 1, "data.path: no folder nowhere"),
    ):
        with pytest.raises(RecipeError) as caught:
            run(photos, tmp_path / "study", override, minutes=minutes)
        assert str(caught.value).startswith(message)
        assert not (tmp_path / "study").exists()


def test_a_range_in_which_everything_diverges_is_reported(photos, tmp_path):
    # One line for all ranks.
    message = r"--lr: all \d+ trials, from 100 to 1000, diverged; valid: a range of lower rates"
    with pytest.raises(AgreedError, match=message):
        run(photos, tmp_path, lr=(100.0, 1000.0))


def test_a_folder_that_cannot_be_used_is_refused(photos, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"--out: cannot write .*: File exists"):
        run(photos, tmp_path / "file")
    (tmp_path / "study").mkdir()
    with locked(tmp_path / "study"), pytest.raises(RecipeError, match=str(tmp_path / "study")):
        run(photos, tmp_path / "study")
    (tmp_path / "study" / JOURNAL).write_text("not a journal\n" * 2)
    with pytest.raises(RecipeError, match=r"--out: .* cannot be read"):
        run(photos, tmp_path / "study")


# --- what is written ----------------------------------------------------------------------------


def test_the_recipe_extends_the_given_one_and_the_numbers_are_json(study):
    found, _, out = study
    text = (out / "recipe.yaml").read_text()
    assert text.startswith("# digits with learning rate and warm-up tuned.\n#\n# Expect")
    assert "extends: digits\n" in text
    tuned = load(str(out / "recipe.yaml")).recipe
    assert tuned.optimizer.lr == found.best.lr
    assert (tuned.seed, tuned.epochs, tuned.data.holdout) == (3, 40, None)
    overrides = [*found.overrides, *found.best_overrides, "data.holdout=null"]
    assert tuned == load("digits", overrides).recipe
    rows = json.loads((out / "trials.json").read_text())
    assert rows["best"] in rows["trials"]
    assert rows["best"]["lr"] == found.best.lr
    assert len(rows["trials"]) == len(found.trials)
    assert "NaN" not in (out / "trials.json").read_text()
    assert Image.open(report.draw(found)).size[0] > 500


def test_a_recipe_of_a_file_is_extended_by_its_path(photos, tmp_path):
    """Its own warm-up is longer than the run, and the search replaces it."""
    base, out = tmp_path / "mine.yaml", tmp_path / "tuning" / "mine"
    base.write_text(f"extends: digits\noptimizer: {{lr: 2}}\ndata: {{path: {photos}}}\n")
    short = ["epochs=2", "schedule.warmup=4ep", "batch_size=4"]
    found, fakes = run(photos, out, *short, recipe=str(base))
    assert {r.schedule.warmup.unit for r in fakes.made} == {"dur"}
    assert "extends: ../../mine.yaml\n" in (out / "recipe.yaml").read_text()
    tuned = load(str(out / "recipe.yaml")).recipe
    assert (tuned.batch_size, tuned.epochs, tuned.optimizer.lr) == (4, 2, found.best.lr)


def test_the_notes_say_how_far_the_neighbours_lie_behind_and_what_limits_the_result(
    study, photos, tmp_path
):
    found, _ = run(photos, tmp_path, lr=(5.0, 50.0), runs=3.0)
    assert "is at the end of its range, 5 to 50" in " ".join(report.summary(found))
    free = study[0]
    lower, higher = report.numbers(free)["behind"].items()
    for rate, points in (lower, higher):
        start = f"neighbour: at learning rate {rate}, all else the same, top-1 is {points:.2f} poi"
        assert any(note.startswith(start) for note in report.summary(free))
    above = free.best.place + 1, 0
    line = {**free.line, above: replace(free.line[above], state="diverged")}
    assert report.numbers(replace(free, line=line))["behind"] == {
        lower[0]: lower[1],
        higher[0]: None,
    }
