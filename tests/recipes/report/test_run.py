"""What a report reads of a run's folder: whole, damaged, resumed, diverged or still growing."""

import json
import subprocess
import sys

import pytest

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.report.groups import groups
from largebatch.recipes.report.reached import reached
from largebatch.recipes.report.run import read_run
from largebatch.recipes.report.tables import outcome
from largebatch.recipes.training.folder.lock import this_process
from largebatch.recipes.training.folder.outcome import metrics_of, outcome_of
from tests.recipes.report.written_runs import IMAGES, write_run


def append(folder, *lines):
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(
            line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines
        )


def test_a_finished_run(tmp_path):
    timeline, lines = write_run(tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert run.train == [line for line in lines if line["split"] == "train"]
    assert run.val == [line for line in lines if line["split"] == "val"]
    assert (run.recipe_name, run.seed, run.status, run.notes) == ("digits", 0, "finished", ())
    assert (run.step, run.last_step) == (112, 112)
    assert run.timeline == timeline


def test_a_line_that_is_being_written_is_left_out(run_of):
    folder = run_of("run", steps=50, summary=False)
    before = read_run(folder)
    append(folder, '{"split": "train", "step": 60, "ep')
    assert read_run(folder) == before
    assert (before.status, before.step, before.last_step) == ("stopped", 50, 112)


def ended(status, reason=""):
    return {"ending.json": {"status": status, "reason": reason}}


def lock_of_an_ended_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return {**this_process(), "process": child.pid, "started": "1"}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({".lock": this_process}, "still running, at step 112 of 112"),
        ({".lock": lock_of_an_ended_process}, "failed at step 112 of 112: process "),
        (ended("stopped", "SIGTERM"), "stopped before its end, at step 112 of 112: SIGTERM"),
        (ended("finished"), "finished after 112 steps"),
        (
            ended("diverged", "weights are not finite"),
            "diverged at step 112 of 112: weights are not finite",
        ),
        (
            ended("failed", "results cannot be written"),
            "failed at step 112 of 112: results cannot be written",
        ),
        ({}, "stopped before its end, at step 112 of 112: its end is not recorded"),
    ],
)
def test_its_state_is_the_one_that_the_list_of_runs_tells(run_of, files, words):
    folder = run_of("run", summary=False)
    for name, content in files.items():
        written = content() if callable(content) else content
        (folder / name).write_text(json.dumps(written))
    run, listed = read_run(folder), outcome_of(folder)
    assert run.status == listed.state
    assert run.reason == listed.reason or run.status == "running"  # whose reason has the time
    told = outcome(run)
    assert told.startswith(words)
    assert "; " not in told
    (row,) = reached(groups({"run": run}))
    assert row.finished == (listed.state == "finished")


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "5",
        "{}",
        '{"split": "train", "step": "3", "epoch": 1}',
        '{"split": "train", "step": -3, "epoch": 1}',
        '{"split": "train", "step": 3, "epoch": NaN}',
        '{"split": "train", "step": 3, "epoch": "1"}',
    ],
)
def test_a_damaged_line_is_left_out_and_told(run_of, line):
    folder = run_of("run", steps=20)
    whole = metrics_of(folder).lines
    append(folder, line + "\n")
    found = metrics_of(folder)
    assert found.lines == whole
    assert found.notes == [f"metrics.jsonl: line {len(whole) + 1} is damaged and left out."]


def test_values_that_are_no_finite_numbers_are_none(run_of):
    folder = run_of("run", steps=20)
    line = '{"split": "train", "step": 30, "epoch": 5.3445, "loss": NaN, "x": [1.0, Infinity]}\n'
    append(folder, line)
    assert metrics_of(folder).train[-1] == {
        "split": "train",
        "step": 30,
        "epoch": 5.3445,
        "loss": None,
        "x": [1.0, None],
    }


def test_steps_that_were_made_again_count_once(tmp_path):
    write_run(tmp_path / "run", steps=60)
    _, again = write_run(tmp_path / "again", seed=1, steps=60)
    repeated = [line for line in again if line["step"] > 30]
    append(tmp_path / "run", *repeated)
    found = metrics_of(tmp_path / "run")
    assert [line["step"] for line in found.train] == [10, 20, 30, 40, 50, 60]
    assert found.train[3:] == [x for x in repeated if x["split"] == "train"]
    (note,) = found.notes
    assert note == "metrics.jsonl: 5 lines were replaced by later lines of the same steps."


def test_steps_before_a_resume_that_were_not_timed_are_told(run_of):
    def edit(line):  # resumed from a checkpoint at step 24: the line of step 30 is of 6 steps
        if line["split"] == "train" and line["step"] == 30:
            line |= {"seconds": line["seconds"] * 0.6, "step_wait_seconds": [0.1] * 6}
        return line

    run = read_run(run_of("run", edit=edit))
    assert run.notes == ("4 steps were not timed, before the run was resumed.",)
    assert run.positions.seconds == pytest.approx(112 * 2.56 - 4 * 2.56)


def test_epochs_images_and_seconds_of_a_step(tmp_path):
    timeline, _ = write_run(tmp_path / "run")
    positions = read_run(tmp_path / "run").positions
    assert positions.at([0, 5, 20, 112]) == {
        "step": [0, 5, 20, 112],
        "epoch": [round(timeline.epoch(step), 4) for step in (0, 5, 20, 112)],
        "images": [0, 5 * 256, 20 * 256, 112 * 256],
        "seconds": [0.0, 12.8, 51.2, 286.72],
    }


def test_without_the_recipe_positions_are_those_of_the_lines(tmp_path):
    _, lines = write_run(tmp_path / "run")
    (tmp_path / "run" / "recipe.yaml").unlink()
    run = read_run(tmp_path / "run")
    assert run.timeline is None
    assert run.notes == ("recipe.yaml cannot be read: No such file or directory.",)
    found = run.positions.at([10, 20])
    ends = {line["step"]: line for line in lines if line["split"] == "train"}
    assert found["epoch"] == [ends[10]["epoch"], ends[20]["epoch"]]
    images = [ends[step]["images_per_second"] * ends[step]["seconds"] for step in (10, 20)]
    assert found["images"] == [round(images[0]), round(sum(images))]


def test_a_run_that_was_never_timed_has_no_seconds(run_of):
    folder = run_of("run", edit=lambda line: {k: v for k, v in line.items() if k != "seconds"})
    assert read_run(folder).positions.at([10])["seconds"] is None


def test_images_come_from_the_checkpoint_if_the_recipe_does_not_know_them(tmp_path):
    folder = tmp_path / "run"
    timeline, _ = write_run(folder, "data.train_images=1000")
    assert read_run(folder).timeline is None  # 1000 images give other epochs than were logged
    assert "learning rate is drawn where it was logged" in read_run(folder).notes[0]
    checkpoint = folder / "checkpoints" / "step-00000112"
    checkpoint.mkdir(parents=True)
    state = {"loader": {"fingerprint": {"images": IMAGES}}}
    (checkpoint / "state.json").write_text(json.dumps(state))
    assert read_run(folder).timeline == timeline


def test_a_recipe_of_another_version_is_told_and_compared_by_its_text(run_of):
    folder = run_of("run")
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text + "abolished: 3\n")
    run = read_run(folder)
    assert run.recipe is None
    assert run.keys["abolished"] == 3
    assert run.keys["optimizer.lr"] == 4.0
    assert "recipe.yaml is not valid today" in run.notes[0]


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(RecipeError, match=r"RUN: .* is no folder; valid: a run's folder"):
        read_run(tmp_path / "nothing")
    with pytest.raises(RecipeError, match=r"RUN: .* holds no run; valid: a run's folder"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RecipeError, match=r"has no metrics yet; valid: a run that has reached"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{\n")
    with pytest.raises(RecipeError, match=r"has no metrics; .*line 1 is damaged"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RecipeError, match=r"RUN: .* cannot be read: it is a folder; valid: "):
        read_run(tmp_path)
