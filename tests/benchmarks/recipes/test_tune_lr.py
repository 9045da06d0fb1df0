"""The script of benchmarks/recipes/tune_lr.py: what it runs, what it repeats and what it prints."""

import json

import pytest

from benchmarks.recipes import tune_lr
from largebatch.recipes.commands.tree import app


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """The commands, which a fake runs: accuracy depends on the recipe and the seed."""
    monkeypatch.chdir(tmp_path)
    made = []

    def fake(module, *arguments):
        made.append(arguments)
        if arguments[:2] == ("tune", "lr"):
            out = tune_lr.Path(arguments[arguments.index("--out") + 1])
            out.mkdir(parents=True)
            best = {"lr": 4.2, "warmup": 0.2}
            content = {"best": best, "held_out": 144, "epochs": 120.0, "epochs_of_a_run": 20.0,
                       "seconds": 540.0, "trials": [best] * 15}  # fmt: skip
            (out / "trials.json").write_text(json.dumps(content))
            return
        run = next(a.partition("=")[2] for a in arguments if a.startswith("run_dir="))
        seed = int(next(a.partition("=")[2] for a in arguments if a.startswith("seed=")))
        tune_lr.Path(run).mkdir(parents=True)
        top1 = (99.5 if arguments[1] == "digits" else 99.3) + 0.1 * seed
        tune_lr.Path(run, "summary.json").write_text(json.dumps({"top1": top1}))

    monkeypatch.setattr(tune_lr, "_run", fake)
    return made


def test_each_measurement_is_made_once_and_compared(commands, tmp_path):
    arguments = ["digits", "--data", "d", "--results", str(tmp_path / "r.json")]
    tune_lr.main(arguments)
    assert len(commands) == 2 + 6 + 3
    searches = [c for c in commands if c[0] == "tune"]
    rates = [a for c in searches for a in c if a.startswith("optimizer.lr=")]
    assert rates == ["optimizer.lr=40.0", "optimizer.lr=0.4"]
    assert all("schedule.warmup=0" in c and "--minutes" in c for c in searches)
    text = (tmp_path / "r.md").read_text()
    assert "| `digits` | 10 times | 15 | 6.0 | 9.0 | rate 4.2, warm-up 20% |" in text
    assert text.count("-0.20 ± 0.23 | met |") == 2
    tune_lr.main(arguments)
    assert len(commands) == 11  # nothing is repeated


def test_a_difference_beyond_the_goal_is_a_miss():
    search = {"recipe": "x", "kind": "search", "factor": 10.0, "of": 9, "epochs": 8.0,
              "epochs_of_a_run": 1.0, "seconds": 60.0,
              "best": {"lr": 1.0, "warmup": 0.1}}  # fmt: skip
    tuned = [{"recipe": "x", "kind": "tuned", "factor": 10.0, "top1": v} for v in (97.4, 97.5)]
    shipped = [{"recipe": "x", "kind": "shipped", "top1": v} for v in (99.0, 99.0)]
    assert tune_lr.table([search, *tuned, *shipped]).rstrip().endswith("| missed |")
    assert len(tune_lr.table([search]).splitlines()) == 2


def test_the_options_are_those_of_the_command():
    import typer.main

    command = typer.main.get_command(app).commands["tune"].commands["lr"]
    known = {option for parameter in command.params for option in parameter.opts}
    given = {a for case in tune_lr.CASES.values() for a in case.budget if a.startswith("--")}
    assert given | {"--nproc", "--out"} <= known


@pytest.mark.parametrize(
    ("found", "half", "said"),
    [(-0.2, 0.2, "met"), (-0.4, 0.4, "undecided"), (-0.6, 0.4, "undecided"), (-1.0, 0.4, "missed")],
)
def test_a_goal_that_the_interval_holds_is_undecided(found, half, said):
    assert tune_lr.verdict(found, half) == said
