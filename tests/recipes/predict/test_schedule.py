"""The schedule of a recipe as the command prints and draws it."""

import pytest
from matplotlib.figure import Figure

from tests.recipes.commands.test_app import run
from tests.recipes.training.test_stages import BATCHES, RUN, rate


def test_the_schedule_command_prints_and_draws_the_stages(tmp_path, monkeypatch):
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda *a, **k: figures.append(a[0]) or save(*a, **k))
    monkeypatch.chdir(tmp_path)  # where no recipe finds its data
    keys = ["data.source=synthetic", "data.train_images=53", "batch_size=16", "micro_batch_size=4"]
    result = run("schedule", "digits", *keys, "schedule.warmup=1ep", *RUN, "--out", "mine.png")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == (
        "digits: 53 images (data.train_images), batch 16, then 32, then 8, "
        "3.31 steps per epoch at first, 11 steps"
    )
    rows = {name.strip(): row for name, *row in (line.rsplit(maxsplit=3) for line in lines[2:-1])}
    epochs = [sum(BATCHES[:step]) / 53 for step in range(11)]
    for name, step in (
        ("end of warm-up, batch 32", 3),
        ("1/2 of decay, batch 8", 5),
        ("last update", 10),
    ):
        wanted = step, round(epochs[step], 2), pytest.approx(rate(step), rel=1e-5)
        assert tuple(map(float, rows[name])) == wanted
    axes = figures[0].axes[0]
    title = "Learning-rate schedule of digits, global batch 16, then 32, then 8"
    assert axes.get_title() == title
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epoch", "learning rate")
    (line,) = axes.lines  # of every step, and of the end
    assert [*line.get_xdata()[:-1]] == pytest.approx(epochs)
    assert [*line.get_ydata()[:-1]] == pytest.approx([rate(step) for step in range(11)])
    assert (tmp_path / "mine.png").stat().st_size > 10_000
