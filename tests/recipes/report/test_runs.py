"""What a report reads of runs and tells in numbers: groups, differences, intervals, positions."""

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.report.page import results
from largebatch.recipes.report.runs import PARTS, differences, estimate, read_runs
from largebatch.recipes.training.folder.outcome import metrics_of
from largebatch.recipes.training.watch.clocks import PHASES
from tests.recipes.report.written_runs import (
    SHARES,
    append,
    diverge,
    end_diverged,
    with_phases,
    write_run,
)

GOLDEN = Path(__file__).with_name("results.txt")


@pytest.fixture
def two(run_of):
    """Two recipes with three seeds and one, and a run that diverged."""
    folders = [run_of(f"a{s}", seed=s, top1=90.0 + s, edit=with_phases) for s in range(3)]
    folders.append(run_of("b", "optimizer.lr=2.0", top1=95.0))
    more = {"seed": 1, "steps": 30, "summary": False, "edit": diverge}
    last = run_of("c", "optimizer.lr=2.0", **more)
    end_diverged(last, "the loss is not finite at step 30")
    return [*folders, last]


def grouped(*folders):
    return read_runs(folders)[0]


def different(*folders):
    return differences([group.runs.values() for group in grouped(*folders)])


def test_the_table_of_what_was_reached(two):
    """Compared with `results.txt`, which is read by eye."""
    text = "".join(" | ".join(row) + "\n" for row in results(grouped(*two)))
    assert text == GOLDEN.read_text("utf-8")


LONG = ["optimizer.momentum=0.8", "schedule.warmup=1ep", "label_smoothing=0.2", "epochs=9"]


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (([], []), ["digits, {a}", "digits, {b}"]),  # of one recipe, and with one seed
        ((["epochs=8"], ["epochs=9", "optimizer.lr=2"]), ["epochs 8, lr 4", "epochs 9, lr 2"]),
        ((["model.args={a: 1}"], []), ["{a}", "{b}"]),  # a key that only one has
        (([], LONG), ["{a}", "{b}"]),
    ],
)
def test_a_name_is_what_sets_a_run_apart(run_of, keys, names):
    a, b = (run_of(name, *of) for name, of in zip("ab", keys, strict=True))
    found = [name for group in grouped(a, b, b / ".") for name in group.runs]
    assert found == [name.format(a=a, b=b) for name in names]


def test_keys_that_do_not_change_training_do_not_divide_seeds(run_of):
    of_an_earlier_version = run_of("d", seed=3)
    with (of_an_earlier_version / "recipe.yaml").open("a") as file:
        file.write("cuda_graph: false\n")
    (group,) = grouped(
        run_of("a", "run_dir=x", "track=[]", "log_every=7"),
        run_of("b", "profile.steps=3..4", seed=1),
        run_of("c", "track=[]", seed=2),
        of_an_earlier_version,
    )
    assert len(group.counted) == 4


def test_what_differs_has_facts_beside_the_recipe(run_of, two):
    assert different(*two) == {"optimizer.lr": ["4", "2"]}
    about = json.loads((two[1] / "summary.json").read_text())
    (two[1] / "summary.json").write_text(json.dumps(about | {"world_size": 8}))
    assert different(*two[:2]) == {"ranks": ["1, 8"]}
    staged = run_of("s", "stages=[{from: 10ep, batch_size: 640, lr: linear}]", "seed=7")
    (stages,) = different(staged, two[0])["stages"][:1]
    assert json.loads(stages)[0]["batch_size"] == 640


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=5),
    st.none() | st.lists(st.floats(0, 100), min_size=1, max_size=5),
)
def test_intervals_are_students_and_welchs(values, others):
    mean, half = estimate(values, others)
    expected = statistics.fmean(values) - (statistics.fmean(others) if others else 0)
    assert mean == pytest.approx(expected, abs=1e-9)
    samples = [values, *([others] if others else [])]
    if min(map(len, samples)) < 2:
        assert half is None
    elif sum(map(np.var, samples)) < 1e-6:
        assert half == pytest.approx(0, abs=0.1)
    elif others is None:
        low, high = scipy.stats.t.interval(0.95, len(values) - 1, 0, scipy.stats.sem(values))
        assert 2 * half == pytest.approx(high - low)
    else:
        test = scipy.stats.ttest_ind(values, others, equal_var=False).confidence_interval(0.95)
        assert 2 * half == pytest.approx(test.high - test.low, rel=1e-4)


@pytest.mark.parametrize("top1", [95.0, 91.5])
def test_a_difference_whose_interval_holds_zero_is_not_significant(run_of, top1):
    folders = [run_of(f"a{s}", seed=s, top1=90.0 + s) for s in range(3)]
    folders += [run_of(f"b{s}", "epochs=10", seed=s, top1=top1 + s / 10) for s in (0, 1)]
    first, second = grouped(*folders)
    mean, half = second.against(first)
    (row,) = [row for row in results([first, second]) if row[0] == "epochs 10"]
    assert row[3].startswith(f"{mean:+.2f} ± {half:.2f}")
    assert row[3].endswith("not significant") == (abs(mean) < half)


def test_one_seed_twice_counts_once_and_only_if_it_finished(run_of):
    folders = [run_of("a", steps=50, summary=False, top1=1.0), run_of("again")]
    folders += [run_of("third", top1=1.0), run_of("b", seed=1)]
    (group,) = grouped(*folders)
    assert len(group.counted) == 2
    assert group.estimates["top1"][0] == 90.0
    assert group.states == "2 seeds finished, 1 stopped"


def test_epochs_images_and_seconds_of_a_line_unless_it_was_not_timed(tmp_path):
    _, lines = write_run(tmp_path / "run")
    (group,) = grouped(tmp_path / "run")
    train = [line for line in lines if line["split"] == "train"]
    images = np.cumsum([line["images_per_second"] * line["seconds"] for line in train])
    val = [line for line in lines if line["split"] == "val"][:2]
    assert group.runs["digits"].positions(val) == {
        "steps": [20, 40],
        "epochs": [line["epoch"] for line in val],
        "images": [pytest.approx(images[i], abs=1e-3) for i in (1, 3)],
        "seconds": [51.2, 102.4],
    }
    write_run(tmp_path / "b", edit=lambda line: {k: v for k, v in line.items() if k != "seconds"})
    untimed = grouped(tmp_path / "b")[0].runs["digits"]
    found = untimed.positions(untimed.metrics.train)
    assert (found["images"], found["seconds"]) == ([], [])


# --- shares of the time --------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_shares_of_the_time_add_up_even_where_phases_exceed_it(run_of, scale):
    found = grouped(run_of("a", edit=lambda line: with_phases(line, scale)))[0].shares
    assert list(PARTS) == [*PHASES, "rest"]  # in the order of the clock
    assert sum(found.values()) == pytest.approx(100)
    assert found["forward_seconds"] == pytest.approx(max(20 * scale / max(1, 0.9 * scale), 0))
    assert found == pytest.approx(SHARES) or scale != 1


# --- what is damaged, or still written -----------------------------------------------------------


def test_damaged_lines_are_left_out_and_told_and_one_that_is_being_written_is_left_out(run_of):
    folder = run_of("run", steps=20)
    whole = metrics_of(folder).lines
    append(folder, *("{", "5", '{"split": "train", "step": "3", "epoch": 1}'))
    append(folder, '{"split": "train", "step": -3, "epoch": 1}')
    append(folder, '{"split": "train", "step": 3, "epoch": NaN}')
    at = {"split": "train", "step": 30, "epoch": 5.3}
    append(folder, at | {"loss": math.nan, "x": [1.0, math.inf]})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"split": "train", "step": 60, "ep')
    assert metrics_of(folder).lines == (*whole, at | {"loss": None, "x": [1.0, None]})
    which = ", ".join(str(len(whole) + number) for number in range(1, 6))
    note = f"digits: metrics.jsonl: 5 lines ({which}) are damaged and left out."
    assert read_runs([folder])[1] == [note]


def test_a_recipe_of_another_version_is_compared_by_its_text_and_a_missing_one_is_told(run_of):
    folders = [run_of("a"), run_of("b"), run_of("c")]
    text = (folders[0] / "recipe.yaml").read_text()
    (folders[0] / "recipe.yaml").write_text(text + "abolished: 3\n")
    assert different(*folders[:2]) == {"abolished": ["3", "—"]}
    (folders[2] / "recipe.yaml").unlink()
    assert read_runs(folders[2:])[1] == ["digits: recipe.yaml cannot be read."]


def test_a_folder_that_is_no_run(tmp_path):
    def fails(folder, message):
        with pytest.raises(RecipeError, match=message):
            read_runs([folder])

    (tmp_path / "metrics.jsonl").write_text("")
    fails(tmp_path, r"has no metrics yet; the first line is written after")
    (tmp_path / "metrics.jsonl").write_text("{\n")
    fails(tmp_path, r"has no metrics; .*line 1 is damaged")
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    fails(tmp_path, r"metrics.jsonl cannot be read: Is a directory; valid: ")
