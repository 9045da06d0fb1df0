"""The picture of a run: its curves are its metrics, its learning rate is that of each step."""

import json
import math
import os

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from largebatch.recipes.report.picture import write_picture
from tests.recipes.report.written_runs import write_run


@pytest.fixture
def drawn(monkeypatch):
    """The points that are drawn, by color, and the titles."""
    found = {"titles": []}
    plot, set_title = Axes.plot, Axes.set_title

    def noted(axes, *points, **style):
        found.setdefault(style["color"], []).append(points)
        return plot(axes, *points, **style)

    monkeypatch.setattr(Axes, "plot", noted)
    monkeypatch.setattr(
        Axes, "set_title", lambda a, title: found["titles"].append(title) or set_title(a, title)
    )
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)  # which takes long
    return found


def test_it_draws_the_metrics(tmp_path, drawn):
    _, lines = write_run(tmp_path / "run")
    write_picture(tmp_path / "run")
    (loss, top1), (rate,) = drawn["tab:orange"], drawn["tab:green"]
    train, val = ([n for n in lines if n["split"] == split] for split in ("train", "val"))
    assert loss == ([line["epoch"] for line in val], [line["loss"] for line in val])
    assert top1[1] == [line["top1"] for line in val]
    assert rate == ([line["epoch"] for line in train], [line["lr"] for line in train])
    assert "Top-1 accuracy: 90.00 % at the last evaluation" in drawn["titles"]


def test_lines_that_are_damaged_or_lack_values_are_gaps(tmp_path, drawn):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    train = [line for line in lines if line["split"] == "train"]
    for place, key in enumerate(("wait_seconds", "seconds", "lr", "loss", "top1")):
        del train[place][key]
    train[5]["seconds"] = 0.0
    path.write_text("{\n" + "".join(json.dumps(line) + "\n" for line in lines))
    write_picture(tmp_path / "run")
    (loss, top1), ((_, shares),) = drawn["tab:blue"], drawn["tab:red"]
    assert [math.isnan(value) for value in loss[1]] == ["loss" not in line for line in train]
    assert [math.isnan(value) for value in top1[1]] == ["top1" not in line for line in train]
    assert [i for i, share in enumerate(shares) if math.isnan(share)] == [0, 1, 5]


@pytest.mark.parametrize("name", [r"a$\frac$b", os.fsdecode(b"run-\xff")])
def test_any_name_of_a_folder_is_drawn_as_it_is(tmp_path, name):
    write_run(tmp_path / name)
    assert write_picture(tmp_path / name).stat().st_size > 10_000


def test_a_run_of_one_split_is_drawn(tmp_path, drawn):
    for split in ("train", "val"):
        write_run(tmp_path / split, edit=lambda n, of=split: n if n["split"] == of else None)
        write_picture(tmp_path / split)
        assert ("tab:orange" in drawn) == (split == "val")
