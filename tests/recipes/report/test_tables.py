"""What a report tells of several runs in numbers: groups, differences, intervals, targets."""

import json
import statistics

import pytest
import scipy.stats

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.report import tables
from largebatch.recipes.report.groups import differences, groups, mixed, read_runs
from largebatch.recipes.report.intervals import difference, mean
from largebatch.recipes.report.reached import quantities, reached


@pytest.fixture
def two(run_of):
    """Two recipes with three seeds and one, and a run that diverged."""
    folders = [run_of(f"a{s}", seed=s, top1=90.0 + s) for s in range(3)]
    folders.append(run_of("b", "optimizer.lr=2.0", top1=95.0))

    def diverge(line):
        return line | {"loss": None} if line["step"] == 30 and line["split"] == "train" else line

    return [
        *folders,
        run_of("c", "optimizer.lr=2.0", seed=1, steps=30, summary=False, edit=diverge),
    ]


def of(folders, target=None):
    return {row.group.name: row for row in reached(groups(read_runs(folders)), target)}


def test_runs_that_differ_only_in_seed_are_grouped(two):
    found = groups(read_runs(two))
    assert {group.name: list(group.runs) for group in found} == {
        "lr 4": ["a0", "a1", "a2"],
        "lr 2": ["b", "c"],
    }
    (row,) = differences(found)
    assert (row.key, row.values) == ("optimizer.lr", ["4", "2"])


def test_keys_that_do_not_change_training_do_not_divide_seeds(run_of):
    folders = [
        run_of("a", "run_dir=x", "mlperf.log=a.log"),
        run_of("b", "mlperf.log=b.log", "profile.steps=3..4", "profile.stacks=true", seed=1),
        run_of("c", "track=[]", seed=2),
    ]
    (group,) = groups(read_runs(folders))
    assert list(group.runs) == ["a", "b", "c"]
    (row,) = reached([group])
    assert row.estimates["top1"].count == 3


def test_means_have_students_interval_over_the_finished_seeds(two):
    rows = of(two)
    top1 = rows["lr 4"].estimates["top1"]
    assert (top1.mean, top1.count) == (91.0, 3)
    low, high = scipy.stats.t.interval(0.95, 2, 91.0, statistics.stdev([90, 91, 92]) / 3**0.5)
    assert (top1.mean - top1.half, top1.mean + top1.half) == pytest.approx((low, high))
    assert rows["lr 2"].unfinished == {"diverged": 1}
    assert list(rows["lr 2"].finished) == ["b"]
    assert rows["lr 2"].estimates["top1"].half is None
    assert rows["lr 2"].top1_difference.mean == 4.0
    assert not rows["lr 2"].top1_difference.is_resolved
    assert tables.accuracy_table(list(rows.values())).rows[1][:4] == [
        "lr 2",
        "1 (1 diverged)",
        "95.00",
        "+4.00, one seed",
    ]


@pytest.mark.parametrize(("top1", "words"), [(95.0, "+4.00 ± "), (91.5, ", unresolved")])
def test_a_difference_is_told_with_welchs_interval(run_of, top1, words):
    folders = [run_of(f"a{s}", seed=s, top1=90.0 + s) for s in range(3)]
    folders += [run_of(f"b{s}", "epochs=10", seed=s, top1=top1 + s / 10) for s in (0, 1)]
    first, second = of(folders).values()
    base, others = [90, 91, 92], [top1, top1 + 0.1]
    test = scipy.stats.ttest_ind(others, base, equal_var=False).confidence_interval(0.95)
    found = second.top1_difference
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx(
        (test.low, test.high)
    )
    cell = tables.accuracy_table([first, second]).rows[1][3]
    assert words.replace("+4.00", f"{found.mean:+.2f}") in cell
    assert ("unresolved" in cell) == (test.low < 0 < test.high)


def test_equal_values_have_an_interval_of_no_width():
    assert mean([3.0, 3.0]).half == 0
    assert difference([3.0, 3.0], [1.0, 1.0]).half == 0
    assert difference([3.0], [1.0, 2.0]).half is None
    assert mean([3.0]).half is None


def test_one_seed_twice_counts_once(run_of):
    folders = [run_of("a"), run_of("again"), run_of("b", seed=1)]
    (row,) = of(folders).values()
    assert list(row.finished) == ["a", "b"]
    (group,) = groups(read_runs(folders))
    assert mixed(group) == [
        "digits: 1 finished run repeats the seed of another; the first finished run of each seed "
        "counts."
    ]


def test_a_run_that_did_not_finish_repeats_no_seed(run_of):
    folders = [run_of("a", steps=50, summary=False), run_of("again"), run_of("b", seed=1)]
    (row,) = of(folders).values()
    assert list(row.finished) == ["again", "b"]
    (group,) = groups(read_runs(folders))
    assert mixed(group) == []


def test_facts_in_which_runs_of_a_group_differ_are_told(run_of):
    folders = [run_of("a"), run_of("b", seed=1)]
    about = json.loads((folders[1] / "summary.json").read_text())
    (folders[1] / "summary.json").write_text(json.dumps(about | {"world_size": 8}))
    (group,) = groups(read_runs(folders))
    assert mixed(group) == ["digits: its runs differ in world_size (1, 8)."]


def test_the_way_to_a_target_ends_at_the_first_evaluation_that_reached_it(two):
    rows = of(two, 50.0)  # accuracy rises in proportion to the steps: 90 % at 112
    run = rows["lr 4"].finished["a0"]
    (line,) = [line for line in run.val if line["step"] == 80]
    assert quantities(run, 50.0)["target_epochs"] == line["epoch"]
    assert quantities(run, 50.0)["target_seconds"] == pytest.approx(80 * 2.56)
    assert rows["lr 4"].hits == 3
    cells = tables.time_table(list(rows.values()))
    at = cells.columns.index("reached the target, 50 %")
    assert [row[at] for row in cells.rows] == ["3 of 3", "1 of 1"]


def test_a_target_that_not_all_reached_has_no_mean(two):
    row = of(two, 90.5)["lr 4"]
    assert row.hits == 2
    assert "target_epochs" not in row.estimates


def test_the_recipes_own_target_is_the_default(run_of):
    (row,) = of([run_of("a", "target_accuracy=50")]).values()
    assert (row.target, row.hits) == (50.0, 1)


def test_many_groups_are_the_rows_of_the_differences(run_of):
    folders = [run_of(f"r{i}", f"optimizer.lr={i + 1}", f"epochs={20 + i}") for i in range(7)]
    few = tables.difference_table(groups(read_runs(folders[:2])))
    assert few.columns == ["key", "epochs 20, lr 1", "epochs 21, lr 2"]
    assert few.rows == [["epochs", "20", "21"], ["optimizer.lr", "1", "2"]]
    many = tables.difference_table(groups(read_runs(folders)))
    assert many.columns == ["run", "epochs", "optimizer.lr"]
    assert many.rows[6] == ["epochs 26, lr 7", "26", "7"]


def test_names_are_as_long_as_it_takes(run_of):
    folders = [run_of("x/run"), run_of("y/run", seed=1), run_of("z", seed=2)]
    assert list(read_runs(folders)) == ["x/run", "y/run", "z"]
    with pytest.raises(RecipeError, match="is named twice; valid: each run once"):
        read_runs([folders[0], folders[0] / "."])


def test_a_run_without_evaluation_has_no_accuracy(run_of):
    folder = run_of("a", edit=lambda line: line if line["split"] == "train" else None)
    found = quantities(read_runs([folder])["a"], 50.0)
    assert "train_loss" in found
    assert not found.keys() & {"top1", "best_top1", "val_loss", "target_epochs"}
    assert dict(tables.summary(read_runs([folder])["a"], 50.0))["Epochs to target, 50 %"] == (
        "not reached"
    )


def test_throughput_and_waiting_are_over_the_whole_run(run_of):
    run = read_runs([run_of("a")])["a"]
    found = quantities(run, None)
    seconds = sum(line["seconds"] for line in run.train)
    images = sum(line["seconds"] * line["images_per_second"] for line in run.train)
    assert found["images_per_second"] == pytest.approx(images / seconds)
    assert found["wait_share"] == pytest.approx(100 * 0.5 * len(run.train) / seconds)
    assert found["evaluate_seconds"] == 1.5 * len(run.val)


def test_the_data_of_the_tables_is_json(two):
    found = json.loads(json.dumps(tables.as_data(groups(read_runs(two)), 50.0), allow_nan=False))
    assert [run["run"] for run in found["runs"]] == ["a0", "a1", "a2", "b", "c"]
    assert found["runs"][4]["status"] == "diverged"
    assert found["groups"][0]["top1"] == {
        "mean": 91.0,
        "half": pytest.approx(2.48414, rel=1e-5),
        "count": 3,
    }
    assert found["groups"][1]["reached_target"] == 1
    assert found["differences"] == [{"key": "optimizer.lr", "values": {"lr 4": "4", "lr 2": "2"}}]
