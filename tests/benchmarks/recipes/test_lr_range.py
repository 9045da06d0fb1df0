"""The table of benchmarks/recipes/lr_range.py, and its resumption."""

import json
from dataclasses import replace

import pytest

from benchmarks.recipes import lr_range
from largebatch.recipes.tune.learning_rate.range_test import RangeTest, analyse


@pytest.fixture
def tested(monkeypatch):
    """The recipes that were tested, none of which is trained."""
    names = []

    def range_test(recipe, overrides, job, out, *, lr):
        names.append(recipe)
        low, high = lr
        rates = [low * (high / low) ** (step / 60) for step in range(60)]
        losses = [2.0 - step / 60 if rate < 20 else 9.0 for step, rate in enumerate(rates)]
        found = analyse(rates, losses)
        made = len(found.smoothed)
        test = RangeTest(
            recipe, "sgd", 256, 1, 4.0, tuple(rates[:made]), tuple(losses[:made]), found, 1.0, 1.0
        )
        if recipe == lr_range.RECIPES[1]:  # one that does not diverge
            return replace(test, findings=replace(found, diverging_lr=None))
        return test

    monkeypatch.setattr(lr_range, "range_test", range_test)
    return names


def test_rules_are_compared_with_the_tuned_rate_and_tests_are_not_repeated(tmp_path, tested):
    path, folders = tmp_path / "lr_range.json", {"digits": tmp_path, "cifar10": tmp_path}
    lr_range.run_missing(path, folders, lr_range.RECIPES[:1])
    lr_range.run_missing(path, folders, lr_range.RECIPES[:2])
    assert tested == list(lr_range.RECIPES[:2])
    lines = lr_range.report(path).splitlines()
    assert path.with_suffix(".md").read_text().splitlines() == lines
    diverges = json.loads(path.read_text())["tests"][0]["diverging_lr"]
    assert 20 < diverges < 30
    ratio = f"{diverges / 10 / 4:.2g}"
    assert lines[2].startswith(f"| digits | 53 | 4 | {diverges:.3g} |")
    assert lines[2].endswith(f"| {ratio} |")
    assert " | no | " in lines[3]
    assert lines[3].endswith(" |  |  |")
    away = f"{4 * 10 / diverges:.2g}"  # a factor above 1, whichever way it is off
    assert [line.split(" | ")[-1] for line in lines[4:6]] == [f"{away} |"] * 2
