"""The plot of a recipe's schedule, and what it needs to be loaded."""

import subprocess
import sys

import matplotlib.figure
import pytest

from largebatch.recipes.predict.schedule import draw, outline
from largebatch.recipes.schema.load import load

STEPS = ["schedule.name=step", "schedule.end=0", "schedule.milestones=[10ep,15ep]"]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draw a recipe's schedule and return the main axes of the figure."""
    figures = []
    save = matplotlib.figure.Figure.savefig

    def keep(figure, *args, **options):
        figures.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    monkeypatch.chdir(tmp_path)  # where no recipe finds its data

    def draw_schedule(name, *overrides):
        draw(outline(load(name, list(overrides))), tmp_path / "schedule.png")
        return figures[-1].axes[0]

    return draw_schedule


def test_the_title_names_the_recipe_and_its_batch(drawn):
    axes = drawn("resnet50-b65536")
    assert axes.get_title() == "Learning-rate schedule of resnet50-b65536, global batch 65,536"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epoch", "learning rate")
    assert [text.get_text() for text in axes.texts] == ["24.7", "13.88", "6.175", "1.549", "0.0001"]


def test_a_rate_is_labelled_once_and_within_the_axes(drawn):
    axes = drawn("digits", *STEPS, "stop_after=12ep")
    assert [text.get_text() for text in axes.texts] == ["4", "0.4", "0.04"]
    legend = {text.get_text() for text in axes.get_legend().get_texts()}
    assert legend == {"warm-up", "stop_after"}
    inside = axes.get_window_extent()
    for text in axes.texts:
        box = text.get_window_extent()
        assert inside.x0 <= box.x0 <= box.x1 <= inside.x1
        assert inside.y0 <= box.y0 <= box.y1 <= inside.y1


def test_the_peak_is_drawn_exactly(drawn):
    (line, *_) = drawn("digits").lines
    assert max(line.get_ydata()) == 4


def test_changes_of_the_batch_are_in_the_title_and_on_the_upper_axis(drawn):
    stage = "{from: 8ep, batch_size: 512, micro_batch_size: 512, lr: linear}"
    axes = drawn("digits", f"stages=[{stage}]")
    assert axes.get_title().endswith("global batch 256, then 512")
    (above,) = axes.child_axes
    assert [text.get_text() for text in above.get_xticklabels()][:2] == ["0", "45"]


@pytest.mark.slow("starts a program that imports torch")
def test_the_schedule_does_not_load_the_trainer():
    program = (
        "import sys, largebatch.recipes.predict.schedule\n"
        "sys.exit('largebatch.recipes.training.trainer' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
