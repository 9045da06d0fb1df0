"""The search as a whole: what it finds, resumes and shares, and what it refuses.

Runs are computed in most tests (see fakes.py), and real in the last ones.
"""

import itertools
import json
import math
from dataclasses import replace
from unittest import mock

import pytest
from PIL import Image

from largebatch.recipes.errors import AgreedError, RecipeError
from largebatch.recipes.schema.load import load
from largebatch.recipes.tune.learning_rate import choose, pruner, report, study
from largebatch.recipes.tune.learning_rate import search as module
from largebatch.recipes.tune.learning_rate.search import Options, search
from tests.ranks import CONTEXT
from tests.recipes.runs import BASE, JOB
from tests.recipes.tune.learning_rate.fakes import FakeRuns, run, worker

#: Runs that are best at a rate below those of the first guesses, so that none is pruned.
LOWER = {"best_lr": 0.5}


def states(found):
    return [(t.stage, t.state) for t in found.trials]


@pytest.mark.parametrize("factor", [10, 0.1])
def test_the_best_settings_are_found_from_a_rate_ten_times_off(photos, tmp_path, factor):
    off = [f"optimizer.lr={4 * factor}", "schedule.warmup=0", "epochs=4"]
    found, runs = run(photos, tmp_path, *off, sampler=choose._suggested, epochs=24.0)
    assert sum(t.epochs for t in found.trials) <= 24
    assert found.best.stage == "fine"
    assert 2 < found.best.settings["lr"] < 8
    assert 0.1 < found.best.settings["warmup"] < 0.3
    assert {r.epochs for r in runs.made} == {1.0, 4.0}
    assert {r.data.holdout for r in runs.made} == {13}
    # The first trial has the recipe's own values, and so has the whole recipe but for these.
    assert runs.made[0].optimizer.lr == 4 * factor
    assert runs.made[0].schedule.warmup.value == 0
    # The tuned recipe is the given one with the best values, on all training images.
    tuned = load("digits", [*found.overrides, *found.best_overrides]).recipe
    assert tuned.optimizer.lr == found.best.settings["lr"]
    assert tuned.epochs == 4


def test_the_precision_of_auto_is_chosen_once(photos, tmp_path):
    _, runs = run(photos, tmp_path, "precision=auto", epochs=6.0)
    assert [r.precision for r in runs.made][:3] == ["auto", "bf16", "bf16"]


@pytest.fixture
def certain(monkeypatch):
    """Accuracies without chance, as if measured on many more than the 13 images here."""
    monkeypatch.setattr(pruner, "ERRORS", 0.0)


@pytest.mark.usefixtures("certain")
def test_trials_that_diverge_or_fall_behind_end_early(photos, tmp_path):
    found, _ = run(photos, tmp_path, "optimizer.lr=40", "epochs=8")
    by_state = {state: [t for t in found.trials if t.state == state] for _, state in states(found)}
    assert all(t.settings["lr"] > 40 for t in by_state["diverged"])
    assert all(t.settings["lr"] <= 40 for t in by_state["finished"])
    assert by_state["pruned"]
    for trial in by_state["pruned"]:
        length = 2 if trial.stage == "coarse" else 8
        judged = max(0.25, trial.settings["warmup"]) * length
        assert judged < trial.epochs < length
    first = [t.state for t in found.trials if t.state != "diverged"][:3]
    assert first == ["finished"] * 3


@pytest.mark.usefixtures("certain")
def test_high_rates_that_catch_up_late_are_not_pruned(photos, tmp_path):
    """As with LARS on CIFAR-10, where the best rates are behind for most of a run."""
    runs = FakeRuns(best_lr=4.0, rise=lambda lr, part: part ** (0.15 * lr))
    low = tuple({"lr": lr, "warmup": 0.2} for lr in (0.5, 0.8, 1.2, 1.6))
    high = tuple({"lr": lr, "warmup": 0.2} for lr in (3.0, 4.0, 6.0))
    found, _ = run(photos, tmp_path, "epochs=4", runs=runs, guesses=(*low, *high), epochs=32.0)
    rates = [guess["lr"] for guess in (*low, *high)]
    states = {t.settings["lr"]: t.state for t in found.trials if t.stage == "coarse"}
    assert [states[rate] for rate in rates] == ["finished"] * 7
    assert found.best.settings == {"lr": 4.0, "warmup": 0.2}
    # Of those that were tried after them, lower rates that were worse were stopped.
    assert {t.state for t in found.trials if t.settings["lr"] < 0.4} == {"pruned"}


def test_the_loss_may_decide(photos, tmp_path):
    found, _ = run(photos, tmp_path, metric="loss", trials=5)
    done = [t for t in found.trials if t.stage == "fine" and t.state == "finished"]
    assert found.best == min(done, key=lambda t: t.loss)


def test_a_search_goes_on_with_a_larger_budget_and_repeats_nothing(photos, tmp_path):
    first, runs = run(photos, tmp_path, trials=3)
    again, none = run(photos, tmp_path, trials=3)
    assert len(runs.made) == 3
    assert none.made == []
    assert again == first
    more, further = run(photos, tmp_path, trials=9)
    assert len(further.made) == 6
    assert more.trials[0] == first.trials[0]
    assert next(t for t in more.trials if t.stage == "fine") == first.trials[2]
    tried = [(t.stage, *t.settings.values()) for t in more.trials]
    assert len(tried) == len(set(tried)) == 9


def test_without_a_coarse_stage_all_trials_have_the_recipes_length(photos, tmp_path):
    found, runs = run(photos, tmp_path, coarse=1.0, trials=6)
    assert {r.epochs for r in runs.made} == {2.0}
    assert {t.stage for t in found.trials} == {"fine"}


def test_guesses_of_the_caller_come_first(photos, tmp_path):
    guesses = ({"lr": 1.5}, {"lr": 3.0, "warmup": 0.25})
    found, _ = run(photos, tmp_path, guesses=guesses, trials=3, coarse=1.0)
    assert [t.settings for t in found.trials[:2]] == [
        {"lr": 1.5, "warmup": 0.5 and found.trials[0].settings["warmup"]},
        {"lr": 3.0, "warmup": 0.25},
    ]


def test_further_values_are_varied(photos, tmp_path):
    also = ("power", "momentum", "weight_decay", "trust_coefficient")
    found, runs = run(photos, tmp_path, also=also, trials=8)
    assert list(found.best.settings) == ["lr", "warmup", *also]
    for key in ("momentum", "weight_decay", "trust_coefficient"):
        assert len({getattr(r.optimizer, key) for r in runs.made}) >= 4
    assert len({r.schedule.power for r in runs.made}) >= 4


def stop_at(number, part):
    """A run that ends by a signal."""

    def fail(run, reading):
        if (run, reading) == (number, part):
            raise SystemExit(143)

    return fail


def test_a_trial_that_is_interrupted_is_run_again(photos, tmp_path):
    with pytest.raises(SystemExit):
        run(photos, tmp_path, runs=FakeRuns(**LOWER, fail=stop_at(2, 4)), trials=4)
    lines = []
    assert not list(tmp_path.glob("trials/*/checkpoints"))
    runs = FakeRuns(**LOWER)
    found, _ = run(photos, tmp_path, runs=runs, trials=4, say=lines.append)
    coarse = [t for t in found.trials if t.stage == "coarse"]
    assert [t.state for t in coarse[:3]] == ["finished", "interrupted", "finished"]
    assert coarse[1].settings == coarse[2].settings
    assert coarse[1].epochs == 0.1875  # what it took is part of the budget
    assert sum(t.counts for t in found.trials) == 4


def test_a_trial_that_outlasts_the_time_ends_early_and_is_run_again(photos, tmp_path):
    late = FakeRuns(**LOWER, late=2)
    found, _ = run(photos, tmp_path, runs=late, minutes=60.0, trials=2, coarse=1.0)
    assert [t.state for t in found.trials] == ["finished", "interrupted", "finished"]
    assert found.trials[2].settings == found.trials[1].settings
    assert found.trials[1].epochs == 0.25


def test_the_study_of_another_recipe_range_or_metric_is_refused(photos, tmp_path):
    run(photos, tmp_path, trials=1)
    for overrides, options, words in (
        (["label_smoothing=0.2"], {}, "recipe.label_smoothing is 0.2 now, 0.1 there"),
        ([], {"lr": (1.0, 2.0)}, "ranges.lr is [1.0, 2.0] now"),
        ([], {"metric": "loss"}, 'metric is "loss" now, "top1" there'),
        ([], {"also": ("power",)}, "ranges.power is"),
        ([], {"coarse": 0.5}, "coarse is 0.5 now, 0.25 there"),
        (["data.holdout=14"], {}, "recipe.data.holdout is 14 now, 13 there"),
    ):
        with pytest.raises(RecipeError, match="holds a study of digits with other settings") as e:
            run(photos, tmp_path, *overrides, trials=2, **options)
        assert words in str(e.value)
        assert str(e.value).endswith("valid: another folder")
    found, _ = run(photos, tmp_path, "run_dir=elsewhere", trials=2)  # is no other recipe
    assert len(found.trials) == 2


def test_the_study_of_an_earlier_version_is_continued(photos, tmp_path):
    run(photos, tmp_path, trials=1)
    journal = tmp_path / "journal.log"
    text = journal.read_text()
    for key in ('"verify": "decode", ', '"verify":"decode",'):
        text = text.replace(key, "")
    assert text != journal.read_text()
    journal.write_text(text)
    with pytest.raises(RecipeError, match='verify is "strict" now, "decode" there'):
        run(photos, tmp_path, "data.verify=strict", trials=2)
    found, _ = run(photos, tmp_path, trials=2)
    assert len(found.trials) == 2


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ([], {"lr": (2.0, 1.0)}, "--lr: 2..1 is an empty range"),
        ([], {"epochs": 1.0}, "--epochs: 1 does not hold one run of the recipe, 2 epochs"),
        ([], {"trials": 0}, "--trials: 0 is no budget"),
        ([], {"minutes": math.nan}, "--minutes: nan is no budget"),
        ([], {"coarse": 0.0}, "--coarse: 0 is no share"),
        ([], {"coarse": 0.1}, "epochs: 0.2 is less than one step"),
        (["data.source=synthetic", "data.holdout=null"], {}, "data.source: synthetic images have"),
        (["batch_size=128", "micro_batch_size=4"], {}, "batch_size: 128 is too large for a run"),
        (["resume=true"], {}, "resume: trials start anew"),
        # The longest warm-up that would be tried is a step, as long as the first milestone.
        (
            ["schedule={name: step, milestones: [1], warmup: 0, end: 0}"],
            {},
            "schedule.milestones: ",
        ),
        (["data.path=nowhere"], {}, "data.path: no folder nowhere"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_is_written(
    overrides, options, message, photos, tmp_path
):
    with pytest.raises(RecipeError) as caught:
        run(photos, tmp_path / "study", *overrides, **options)
    assert str(caught.value).startswith(message)
    assert not (tmp_path / "study").exists()


def test_a_range_in_which_everything_diverges_is_reported(photos, tmp_path):
    # One line for all ranks.
    with pytest.raises(AgreedError, match=r"--lr: none of 4 trials between 100 and 1000 finished"):
        run(photos, tmp_path, lr=(100.0, 1000.0), trials=4)


def test_trials_of_other_workers_that_have_not_finished_are_named(photos, tmp_path):
    def another(number, part):
        if part == 1:
            with pytest.raises(AgreedError, match=r"--out: no trial of .* has finished yet") as e:
                run(photos, tmp_path, trials=1)
            seen.append(str(e.value))

    seen = []
    run(photos, tmp_path, runs=FakeRuns(fail=another), trials=1)
    assert len(seen) == 1


def test_trials_do_not_measure_the_gradient_noise(photos, tmp_path):
    """Its interval may be longer than a coarse trial."""
    _, runs = run(photos, tmp_path, "gradient_noise_every=2ep", trials=2)
    assert {r.gradient_noise_every for r in runs.made} == {None}


def test_a_signal_at_the_end_of_a_trial_ends_the_search_but_keeps_the_trial(photos, tmp_path):
    class Late(FakeRuns):
        def __call__(self, *arguments):
            return replace(super().__call__(*arguments), signal=2)

    with pytest.raises(SystemExit) as ended:
        run(photos, tmp_path, runs=Late(**LOWER), trials=3)
    assert ended.value.code == 130
    found, runs = run(photos, tmp_path, runs=FakeRuns(**LOWER), trials=3)
    assert [t.state for t in found.trials] == ["finished"] * 3
    assert len(runs.made) == 2


def test_a_folder_that_cannot_be_used_is_refused(photos, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="--out: cannot write into"):
        run(photos, tmp_path / "file", trials=1)
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / study.JOURNAL).write_text("not a journal\n" * 2)
    with pytest.raises(RecipeError, match=r"--out: .* cannot be read"):
        run(photos, tmp_path / "study", trials=1)


# --- several workers ----------------------------------------------------------------------------


def test_a_line_of_the_journal_that_was_cut_off_is_dropped(photos, tmp_path):
    first, _ = run(photos, tmp_path, trials=2)
    with (tmp_path / study.JOURNAL).open("a") as file:
        file.write('{"op_code":5,"worker')
    found, _ = run(photos, tmp_path, trials=3)
    assert found.trials[0] == first.trials[0]
    assert len(found.trials) == 3


def test_a_worker_of_another_machine_counts_as_killed_once_its_folder_is_still(
    photos, tmp_path, monkeypatch
):
    here = study.socket.gethostname()
    monkeypatch.setattr(study.socket, "gethostname", lambda: "another")
    # As a kill would leave it: nothing is noted at the end.
    monkeypatch.setattr(study.Study, "tell", lambda *a: None)
    with pytest.raises(SystemExit):
        run(photos, tmp_path, runs=FakeRuns(fail=stop_at(1, 2)), trials=3)
    monkeypatch.undo()
    monkeypatch.setattr(study.socket, "gethostname", lambda: here)
    found, _ = run(photos, tmp_path, trials=3)
    assert found.trials[0].state == "running"
    monkeypatch.setattr(study, "PATIENCE_SECONDS", -1.0)
    found, runs = run(photos, tmp_path, trials=3)
    assert found.trials[0].state == "interrupted"
    assert len(runs.made) == 1
    assert runs.made[0].optimizer.lr == found.trials[0].settings["lr"]


@pytest.mark.slow("starts two workers, one of which is killed, and a third one")
def test_workers_share_trials_and_budget_and_replace_a_killed_one(photos, tmp_path):
    """No trial is made twice but the killed one's, and together they keep to the budget."""
    options = {"trials": 10}
    first = CONTEXT.Process(target=worker, args=(photos, tmp_path, 1.0, options, True))
    first.start()
    first.join(120)
    assert first.exitcode == -9
    with CONTEXT.Pool(2) as pool:
        tasks = [pool.apply_async(worker, (photos, tmp_path, 0.5, options)) for _ in range(2)]
        made = [task.get(300) for task in tasks]
    assert all(made)  # both worked
    ours = list(itertools.chain(*made))
    assert len(ours) == len(set(ours)) == 9  # the first worker finished one
    found, runs = run(photos, tmp_path, **options)
    assert runs.made == []
    lost = [t for t in found.trials if t.state == "interrupted"]
    assert [t.number for t in lost] == [1]
    assert sum(t.settings == lost[0].settings and t.stage == "coarse" for t in found.trials) == 2
    assert sum(t.counts for t in found.trials) == 10


# --- what is written ----------------------------------------------------------------------------


def test_the_recipe_extends_the_given_one_and_the_numbers_are_json(photos, tmp_path):
    found, _ = run(photos, tmp_path / "a", "seed=3", "schedule.warmup=0", trials=5)
    paths = report.write(found, tmp_path / "a")
    assert all(path.stat().st_size for path in paths)
    text = (tmp_path / "a" / "recipe.yaml").read_text()
    assert text.startswith("# digits with learning rate and warm-up tuned.\n#\n# Expected: ")
    assert "it has not been" in text
    assert "extends: digits\n" in text
    tuned = load(str(tmp_path / "a" / "recipe.yaml")).recipe
    assert tuned.optimizer.lr == found.best.settings["lr"]
    assert tuned.seed == 3
    assert tuned.data.holdout is None
    assert (
        tuned
        == load("digits", [*found.overrides, *found.best_overrides, "data.holdout=null"]).recipe
    )
    rows = json.loads((tmp_path / "a" / "trials.json").read_text())
    assert rows["best"]["lr"] == found.best.settings["lr"]
    assert len(rows["trials"]) == len(found.trials)
    assert "NaN" not in (tmp_path / "a" / "trials.json").read_text()


def test_a_recipe_of_a_file_is_extended_by_its_path(photos, tmp_path):
    base = tmp_path / "mine.yaml"
    base.write_text(f"extends: digits\nbatch_size: 32\nepochs: 2\ndata: {{path: {photos}}}\n")
    small = [o for o in BASE if not o.startswith(("batch_size", "epochs", "optimizer.lr"))]
    out = tmp_path / "tuning" / "mine"
    with mock.patch.object(module, "measure", FakeRuns()):
        found = search(
            str(base), [*small, "scale=linear", "batch_size=16", "data.holdout=13"], JOB, out,
            Options(trials=3, coarse=0.5), lambda _: None,
        )  # fmt: skip
    report.write(found, out)
    assert "extends: ../../mine.yaml\n" in (out / "recipe.yaml").read_text()
    tuned = load(str(out / "recipe.yaml")).recipe
    assert tuned.batch_size == 16
    assert tuned.optimizer.lr == found.best.settings["lr"]


def test_the_notes_say_what_limits_the_result(photos, tmp_path):
    found, _ = run(photos, tmp_path, lr=(5.0, 50.0), trials=6)
    edge = replace(found, best=replace(found.best, settings={"lr": 5.0, "warmup": 0.1}))
    notes = "\n".join(report.notes(edge))
    assert "runs of the recipe" in notes
    assert "the best learning rate, 5, is at the end of its range, 5 to 50" in notes
    assert "two standard errors" in notes
    short = replace(found, best=replace(found.best, stage="coarse"))
    assert "no trial of full length fitted into the budget" in "\n".join(report.notes(short))


def test_the_picture_shows_each_trial(photos, tmp_path):
    found, _ = run(photos, tmp_path, "optimizer.lr=40", also=("momentum",), trials=9)
    report.draw(found, tmp_path / "p.png")
    width, height = Image.open(tmp_path / "p.png").size
    assert width > 1.5 * height
