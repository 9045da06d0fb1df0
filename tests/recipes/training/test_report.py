"""The report of a run: the learning rate that it draws is that of each step."""

import json
import math
import os

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from largebatch.recipes.schema.load import dump, load
from largebatch.recipes.training.checkpoint_files import MODEL, facts_of, write_state
from largebatch.recipes.training.lr import learning_rates
from largebatch.recipes.training.metrics import METRICS
from largebatch.recipes.training.report import write_report
from largebatch.recipes.training.timeline import timeline_of

IMAGES = 1437
STAGED = ["stages=[{from: 10ep, batch_size: 640, lr: linear}]", "optimizer.lr=3"]


@pytest.fixture
def drawn(monkeypatch):
    """What is drawn in the color of the learning rate."""
    lines = []
    plot = Axes.plot

    def noted(axes, *points, **style):
        if style.get("color") == "tab:green":
            lines.append(points)
        return plot(axes, *points, **style)

    monkeypatch.setattr(Axes, "plot", noted)
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)  # which takes long
    return lines


def write_run(folder, *keys):
    """The folder of a finished run that logged every 10 steps, as the report reads it."""
    recipe = load("digits", ["log_every=10", *keys]).recipe
    timeline = timeline_of(recipe, IMAGES)
    schedule = learning_rates(recipe, timeline).schedule
    (folder / "recipe.yaml").write_text("# The recipe digits as it ran.\n" + dump(recipe))
    values = {"loss": 1.0, "top1": 50.0, "wait_seconds": 0.1, "seconds": 1.0}
    logged = range(10, timeline.total_steps + 1, 10)
    lines = [
        {"split": "train", "step": s, "epoch": timeline.epoch(s), "lr": schedule(s - 1), **values}
        for s in logged
    ]
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    checkpoint = folder / "checkpoints" / "step-00000112"
    checkpoint.mkdir(parents=True)
    state = {"step": 112, "world_size": 8, "precision": {}, "recipe": {}}
    state["loader"] = {"position": 0, "fingerprint": {"images": IMAGES}}
    (checkpoint / MODEL).touch()
    write_state(checkpoint, state, facts_of([checkpoint / MODEL]))
    return timeline, schedule, lines


@pytest.mark.parametrize(("keys", "peak"), [([], 4.0), (STAGED, 6.0)])
def test_it_draws_the_learning_rate_of_each_step(tmp_path, drawn, keys, peak):
    timeline, schedule, lines = write_run(tmp_path, *keys)
    write_report(tmp_path)
    ((epochs, rates),) = drawn
    steps = range(lines[-1]["step"])
    assert rates == [schedule(step) for step in steps]
    assert epochs == [timeline.epoch(step) for step in steps]
    if not keys:
        assert max(line["lr"] for line in lines) < 0.95 * peak
        assert max(rates) == peak


@pytest.mark.parametrize("lost", ["recipe.yaml", "checkpoints/step-00000112/state.json"])
@pytest.mark.parametrize("content", [None, "batchsize: [", "{}"])
def test_without_the_recipe_it_draws_the_logged_learning_rates(tmp_path, drawn, lost, content):
    _, _, lines = write_run(tmp_path)
    if content is None:
        (tmp_path / lost).unlink()
    else:
        (tmp_path / lost).write_text(content)
    write_report(tmp_path)
    (points,) = drawn
    assert points == ([line["epoch"] for line in lines], [line["lr"] for line in lines])


@pytest.mark.parametrize("fingerprint", [[], {"images": "x"}, {"images": 0}])
def test_a_damaged_checkpoint_gives_the_logged_learning_rates(tmp_path, drawn, fingerprint):
    _, _, lines = write_run(tmp_path)
    path = tmp_path / "checkpoints" / "step-00000112" / "state.json"
    state = json.loads(path.read_text())
    state["loader"]["fingerprint"] = fingerprint
    path.write_text(json.dumps(state))
    write_report(tmp_path)
    (points,) = drawn
    assert points == ([line["epoch"] for line in lines], [line["lr"] for line in lines])


def test_a_run_that_was_resumed_with_another_learning_rate_has_it_as_logged(tmp_path, drawn):
    _, _, lines = write_run(tmp_path)
    lines[0]["lr"] *= 1.001
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(tmp_path)
    (points,) = drawn
    assert points == ([line["epoch"] for line in lines], [line["lr"] for line in lines])


def test_its_accuracy_is_that_of_the_last_evaluation(tmp_path, drawn, monkeypatch):
    _, _, lines = write_run(tmp_path)
    val = {"split": "val", "step": 60, "epoch": 10.0, "loss": 1.0, "top1": 62.5}
    cut = [line for line in lines if line["step"] <= 60]  # a run that was stopped, or still goes on
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in [*cut, val]))
    titles, set_title = [], Axes.set_title
    monkeypatch.setattr(Axes, "set_title", lambda a, t: titles.append(t) or set_title(a, t))
    write_report(tmp_path)
    assert "Top-1 accuracy: 62.50 % at the last evaluation" in titles


def test_lines_that_are_damaged_or_lack_values_are_gaps(tmp_path, drawn):
    _, _, lines = write_run(tmp_path)
    (tmp_path / "recipe.yaml").unlink()
    for place, key in enumerate(("wait_seconds", "seconds", "lr", "loss", "top1")):
        del lines[place][key]
    lines[5]["seconds"] = 0.0
    val = {"split": "val", "step": 112, "epoch": 20.0}
    text = "".join(json.dumps(line) + "\n" for line in [*lines, val])
    (tmp_path / METRICS).write_text("{\n" + text)
    write_report(tmp_path)
    ((epochs, rates),) = drawn
    assert epochs == [line["epoch"] for line in lines]
    assert [math.isnan(rate) for rate in rates] == ["lr" not in line for line in lines]


@pytest.mark.parametrize("name", [r"a$\frac$b", os.fsdecode(b"run-\xff")])
def test_any_name_of_a_folder_is_drawn_as_it_is(tmp_path, name):
    (tmp_path / name).mkdir()
    write_run(tmp_path / name)
    assert write_report(tmp_path / name).stat().st_size > 10_000
