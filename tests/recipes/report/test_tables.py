"""What a report shows of several runs in numbers: groups, differences, intervals, targets."""

import json
import statistics
from pathlib import Path

import pytest
import scipy.stats

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.report import tables
from largebatch.recipes.report.groups import differences, groups, notes, read_runs
from largebatch.recipes.report.reached import difference, mean, quantities, reached
from largebatch.recipes.report.run import read_run
from tests.recipes.report.test_shares import EXPECTED, with_phases

GOLDEN = Path(__file__).with_name("tables.txt")


@pytest.fixture
def two(run_of):
    """Two recipes with three seeds and one, and a run that diverged."""
    folders = [run_of(f"a{s}", seed=s, top1=90.0 + s, edit=with_phases) for s in range(3)]
    folders.append(run_of("b", "optimizer.lr=2.0", top1=95.0))

    def diverge(line):
        return line | {"loss": None} if line["step"] == 30 and line["split"] == "train" else line

    return [
        *folders,
        run_of("c", "optimizer.lr=2.0", seed=1, steps=30, summary=False, edit=diverge),
    ]


def grouped(*folders):
    return groups(read_runs(folders)[0])


def of(folders, target=None):
    return {row.group.name: row for row in reached(grouped(*folders), target)}


def test_the_tables(two, tmp_path):
    """A page of two groups and of one run, compared with `tables.txt`, which is read by eye."""
    found = grouped(*two)
    every = [*tables.group_tables(found, 90.5), tables.difference_table(found)]
    text = ""
    for table in (*every, tables.runs_table(found, 90.5)):
        text += f"{table.title}\n"
        text += "".join(" | ".join(row) + "\n" for row in [table.columns, *table.rows]) + "\n"
    run = read_run(two[0])
    for pairs in (tables.summary(run, 90.5), tables.setting(run)):
        text += "".join(f"{label}: {value}\n" for label, value in pairs) + "\n"
    text += f"{tables.outcome(run)}\n"
    text = text.replace(f"{tmp_path}/", "").replace("\xa0", " ")
    assert text == GOLDEN.read_text("utf-8")


def test_each_run_has_one_name_on_a_page(two):
    found = grouped(*two)
    names = [name for group in found for name in group.runs]
    assert names == ["lr 4, seed 0", "lr 4, seed 1", "lr 4, seed 2", "lr 2, seed 0", "lr 2, seed 1"]
    assert [row[0] for row in tables.runs_table(found, None).rows] == names
    assert [run["run"] for run in tables.as_data(found, None)["runs"]] == names


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (([], []), ["digits, a", "digits, b"]),  # of one recipe, and with one seed
        ((["epochs=8"], ["epochs=9", "optimizer.lr=2"]), ["epochs 8, lr 4", "epochs 9, lr 2"]),
        ((["model.args={a: 1}"], []), ["a", "b"]),  # a key that only one has
    ],
)
def test_a_name_is_what_sets_a_run_apart(run_of, keys, names):
    folders = [run_of(name, *of) for name, of in zip("ab", keys, strict=True)]
    assert [name for group in grouped(*folders) for name in group.runs] == names


def test_where_all_that_differs_is_too_long_a_key_that_suffices_is_the_name(run_of):
    more = "optimizer.momentum=0.8", "schedule.warmup=1ep", "label_smoothing=0.2", "epochs=9"
    found = grouped(run_of("a"), run_of("b", *more))
    assert [group.name for group in found] == ["epochs 20", "epochs 9"]


def test_keys_that_do_not_change_training_do_not_divide_seeds(run_of):
    found = grouped(
        run_of("a", "run_dir=x", "mlperf.log=a.log"),
        run_of("b", "mlperf.log=b.log", "profile.steps=3..4", "profile.stacks=true", seed=1),
        run_of("c", "track=[]", seed=2),
    )
    (row,) = reached(found)
    assert row.estimates["top1"].count == 3


def test_means_have_students_interval_over_the_finished_seeds(two):
    rows = of(two)
    top1 = rows["lr 4"].estimates["top1"]
    low, high = scipy.stats.t.interval(0.95, 2, 91.0, statistics.stdev([90, 91, 92]) / 3**0.5)
    assert (top1.mean - top1.half, top1.mean + top1.half) == pytest.approx((low, high))
    second = rows["lr 2"]
    assert (second.finished, second.unfinished) == (1, {"diverged": 1})
    assert (second.top1_difference.mean, second.top1_difference.is_significant) == (4.0, False)


@pytest.mark.parametrize("top1", [95.0, 91.5])
def test_a_difference_has_welchs_interval(run_of, top1):
    folders = [run_of(f"a{s}", seed=s, top1=90.0 + s) for s in range(3)]
    folders += [run_of(f"b{s}", "epochs=10", seed=s, top1=top1 + s / 10) for s in (0, 1)]
    base, others = [90, 91, 92], [top1, top1 + 0.1]
    test = scipy.stats.ttest_ind(others, base, equal_var=False).confidence_interval(0.95)
    _, second = of(folders).values()
    found = second.top1_difference
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx(
        (test.low, test.high)
    )
    cell = tables.group_tables(grouped(*folders), None)[0].rows[1][3]
    assert cell.startswith(f"{found.mean:+.2f} ± {found.half:.2f}")
    assert cell.endswith("not significant") == (test.low < 0 < test.high)


def test_equal_values_have_an_interval_of_no_width():
    assert mean([3.0, 3.0]).half == 0
    assert difference([3.0, 3.0], [1.0, 1.0]).half == 0
    assert difference([3.0], [1.0, 2.0]).half is None
    assert mean([3.0]).half is None


def test_one_seed_twice_counts_once_and_only_if_it_finished(run_of):
    folders = [run_of("a", steps=50, summary=False, top1=1.0), run_of("again")]
    folders += [run_of("third", top1=1.0), run_of("b", seed=1)]
    (row,) = of(folders).values()
    assert (row.finished, row.estimates["top1"].mean) == (2, 90.0)


def test_facts_in_which_runs_differ_are_shown(run_of):
    folders = [run_of("a"), run_of("b", seed=1)]
    about = json.loads((folders[1] / "summary.json").read_text())
    (folders[1] / "summary.json").write_text(json.dumps(about | {"world_size": 8}))
    assert differences(grouped(*folders)) == {"world_size": ["1, 8"]}


def test_the_way_to_a_target_ends_at_the_first_evaluation_that_reached_it(two):
    row = of(two, 50.0)["lr 4"]  # accuracy rises in proportion to the steps: 90 % at 112
    run = read_run(two[0])
    (line,) = [line for line in run.val if line["step"] == 80]
    found = quantities(run, 50.0)
    assert found["target_epochs"] == line["epoch"]
    assert found["target_seconds"] == pytest.approx(80 * 2.56)
    assert row.hits == 3
    some = of(two, 90.5)["lr 4"]
    assert some.hits == 2
    assert "target_epochs" not in some.estimates  # a mean is of all


def test_the_recipes_own_target_is_the_default(run_of):
    (row,) = of([run_of("a", "target_accuracy=50")]).values()
    assert (row.target, row.hits) == (50.0, 1)


def test_many_groups_are_the_rows_of_the_differences(run_of):
    folders = [run_of(f"r{i}", f"optimizer.lr={i + 1}", f"epochs={20 + i}") for i in range(7)]
    few = tables.difference_table(grouped(*folders[:2]))
    assert few.columns == ["key", "epochs 20, lr 1", "epochs 21, lr 2"]
    assert few.rows == [["epochs", "20", "21"], ["optimizer.lr", "1", "2"]]
    many = tables.difference_table(grouped(*folders))
    assert many.columns == ["run", "epochs", "optimizer.lr"]
    assert many.rows[6] == ["epochs 26, lr 7", "26", "7"]


def test_folders_are_named_as_long_as_it_takes(run_of):
    folders = [run_of("x/run"), run_of("y/run", seed=1), run_of("z", seed=2)]
    assert list(read_runs(folders)[0]) == ["x/run", "y/run", "z"]
    with pytest.raises(RecipeError, match="is named twice; valid: each run once"):
        read_runs([folders[0], folders[0] / "."])


def test_a_run_without_evaluation_has_no_accuracy(run_of):
    run = read_run(run_of("a", edit=lambda line: line if line["split"] == "train" else None))
    found = quantities(run, 50.0)
    assert "train_loss" in found
    assert not found.keys() & {"top1", "best_top1", "val_loss", "target_epochs"}
    assert dict(tables.summary(run, 50.0))["Epochs to target, 50 %"] == "not reached"


def test_throughput_and_waiting_are_over_the_whole_run(run_of):
    run = read_run(run_of("a"))
    found = quantities(run, None)
    seconds = sum(line["seconds"] for line in run.train)
    images = sum(line["seconds"] * line["images_per_second"] for line in run.train)
    assert found["images_per_second"] == pytest.approx(images / seconds)
    assert found["wait_share"] == pytest.approx(100 * 0.5 * len(run.train) / seconds)
    assert found["evaluate_seconds"] == 1.5 * len(run.val)


SPENT = {"training": 60.0, "evaluation": 0.0, "checkpoints": 10.0, "start_up": 25.0, "rest": 5.0}


def test_the_summary_has_where_the_wall_time_went(run_of):
    folder = run_of("run", steps=50, summary=False)
    facts = {"status": "stopped", "reason": "SIGTERM", "time": 0.0, "from_step": 20}
    (folder / "ending.json").write_text(json.dumps(facts | {"time_spent": SPENT}))
    found = dict(tables.summary(read_run(folder), None))
    assert [value for label, value in found.items() if label.startswith("Wall time")] == [
        "100.0\xa0s",
        *("60.0\xa0%", "10.0\xa0%", "25.0\xa0%", "5.0\xa0%"),
    ]
    assert "Wall time since step 20" in found
    for damaged in (None, 3, [], {"training": None}):
        (folder / "ending.json").write_text(json.dumps(facts | {"time_spent": damaged}))
        assert not [x for x in dict(tables.summary(read_run(folder), None)) if "Wall" in x]


def test_the_data_of_the_tables_is_json(two):
    found = json.loads(json.dumps(tables.as_data(grouped(*two), 50.0), allow_nan=False))
    first, *_, last = found["runs"]
    assert (first["folder"], first["group"]) == (str(two[0]), "lr 4")
    assert (first["training_time_readings"], first["readings"]) == (12, 12)
    assert first["training_time_percent"] == {
        key.removesuffix("_seconds"): pytest.approx(share) for key, share in EXPECTED.items()
    }
    assert (last["status"], last["training_time_percent"]) == ("diverged", None)
    half = pytest.approx(2.48414, rel=1e-5)
    assert found["groups"][0]["top1"] == {"mean": 91.0, "half": half, "count": 3}
    assert found["groups"][1]["reached_target"] == 1
    assert found["differences"] == [{"key": "optimizer.lr", "values": {"lr 4": "4", "lr 2": "2"}}]


def test_notes_name_the_run_where_there_are_several(run_of):
    def edit(line):  # resumed from a checkpoint at step 24: the line of step 30 is of 6 steps
        if line["split"] == "train" and line["step"] == 30:
            line |= {"seconds": line["seconds"] * 0.6, "step_wait_seconds": [0.1] * 6}
        return line

    folder = run_of("run", edit=edit)
    told = "4 steps were not timed, before the run was resumed."
    assert notes(grouped(folder)) == [told]
    assert notes(grouped(folder, run_of("b", seed=1))) == [f"digits, seed 0: {told}"]
