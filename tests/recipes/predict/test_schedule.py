"""The plot of a recipe's schedule, and what it needs to be loaded."""

from itertools import pairwise

import pytest
from matplotlib.figure import Figure

from largebatch.recipes.predict.schedule import draw, outline
from largebatch.recipes.schema.load import load

STEPS = ["schedule.name=step", "schedule.end=0", "schedule.milestones=[10ep,15ep]"]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draw a recipe's schedule and return the main axes of the figure."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    monkeypatch.chdir(tmp_path)  # where no recipe finds its data

    def draw_schedule(name, *overrides):
        draw(outline(load(name, list(overrides))), tmp_path / "schedule.png")
        return figures[-1].axes[0]

    return draw_schedule


def test_it_shows_every_rate_and_names_the_recipe_and_its_batches(drawn):
    axes = drawn("resnet50-b65536")
    assert axes.get_title() == "Learning-rate schedule of resnet50-b65536, global batch 65,536"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epoch", "learning rate")
    stage = "{from: 8ep, batch_size: 512, lr: linear}"
    axes = drawn("digits", *STEPS, f"stages=[{stage}]")
    assert axes.get_title().endswith("global batch 256, then 512")
    (line,) = axes.lines
    assert max(line.get_ydata()) == 8  # at its peak, exactly
    falls = [b / a for a, b in pairwise(line.get_ydata()) if b < 0.5 * a]
    assert falls == pytest.approx([0.1, 0.1])
