"""What the end of a run is told from: its metrics, its recipe, its clock and its process."""

import subprocess
import sys
import time
from pathlib import Path

from largebatch.recipes.schema.catalogue import promised_as_it_is
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.ending_table import _target, _where_the_time_went
from largebatch.recipes.training.process import age_seconds


def test_what_a_recipe_promises_is_shown_where_it_runs_as_it_is():
    recipe = load("digits").recipe
    text = "99.4 to 99.7 % top-1 on the 360 held-out images"
    assert promised_as_it_is("digits", recipe).startswith(text)
    elsewhere = ["data.path=/elsewhere", "run_dir=x", "precision=bf16", "data.threads=3"]
    elsewhere += ["data.source=webdataset", "data.backend=torchvision", "data.prefetch=4"]
    assert promised_as_it_is("digits", load("digits", elsewhere).recipe).startswith(text)
    for key in (
        *("epochs=3", "optimizer.lr=2", "stop_after=1ep", "model.name=resnet18"),
        *("target_accuracy=50", "data.image_size=16", "data.holdout=100", "data.flip=1"),
    ):
        assert promised_as_it_is("digits", load("digits", [key]).recipe) == "", key
    synthetic = load("digits", ["data.source=synthetic", "data.path=null"]).recipe
    assert promised_as_it_is("digits", synthetic) == ""
    assert promised_as_it_is("my-own", recipe) == ""


def test_the_time_to_the_target_has_all_steps_up_to_it_in_any_order_of_the_lines():
    def line(split, step, seconds, **values):
        return {"split": split, "step": step, "epoch": step / 4, "seconds": seconds, **values}

    lines = [
        line("train", 2, 1.0),
        line("val", 4, 10.0, top1=None),
        line("train", 4, 2.0),
        {"split": "trust_ratio", "step": 4, "epoch": 1.0},
        line("val", 7, 20.0, top1=51.0),
        line("train", 7, 4.0),  # of the same steps, written after the evaluation
        line("train", 8, 8.0),
        line("val", 8, 40.0, top1=60.0),
    ]
    hit = {"accuracy": 50.0, "top1": 51.0, "step": 7, "epoch": 1.75, "seconds": 37.0}
    assert _target(50.0, lines) == hit
    assert _target(60.5, lines) is _target(None, lines) is None


def test_shares_of_the_time_add_up():
    spent = {
        "training": 60.0,
        "evaluation": 20.0,
        "checkpoints": 0.0,
        "start_up": 15.0,
        "rest": 5.0,
    }
    phases = {"input_seconds": 6.0, "forward_seconds": 18.0, "backward_seconds": 30.0}
    facts = {
        "time_spent": {**spent, "total": 100.0},
        "training_time": phases,
        "first_wait_seconds": 2.0,
        "from_step": 0,
    }
    lines = list(_where_the_time_went(facts))
    assert lines == [
        "where the time went            1.7 min  100.0 %",
        "  training                        60 s   60.0 %",
        "    waiting for data             6.0 s    6.0 %, 2.0 s of it before the first step",
        "    forward                       18 s   18.0 %",
        "    backward                      30 s   30.0 %",
        "    rest of training             6.0 s    6.0 %",
        "  evaluation                      20 s   20.0 %",
        "  start-up                        15 s   15.0 %",
        "  rest                           5.0 s    5.0 %",
    ]


def test_the_age_of_a_process_is_the_time_since_it_started():
    code = (
        "import sys, time; sys.path.insert(0, 'src'); time.sleep(0.5)\n"
        "from largebatch.recipes.training.process import age_seconds; print(age_seconds())"
    )
    start = time.perf_counter()
    root = Path(__file__).parents[3]
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )
    assert 0.4 <= float(found.stdout) <= time.perf_counter() - start + 0.1
    assert age_seconds() > 0
