"""What a run shows while it trains: a golden text, on terminals, in a file, and with --quiet."""

import io
import json
import re
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console

from largebatch.recipes.schema.load import load
from largebatch.recipes.train import main
from largebatch.recipes.training.folder.metrics import read_metrics
from largebatch.recipes.training.screen.console import Display
from largebatch.recipes.training.timeline import timeline_of
from largebatch.recipes.training.trainer import Trainer
from tests.recipes.runs import BASE, JOB, make

READING = {"loss": 4.3214, "top1": 21.987, "lr": 8.1234, "images_per_second": 18432.0}
READING |= {"wait_seconds": 1.78, "seconds": 17.78, "memory_bytes": 61.2e9}


@cache
def imagenet(run_dir=Path("nowhere"), step=0):
    """A run of resnet50-b65536 as the display sees it."""
    recipe = load("resnet50-b65536").recipe
    timeline = timeline_of(recipe, 1_281_167, 64)
    whole = {"recipe": recipe, "timeline": timeline, "last_step": timeline.total_steps}
    whole |= {"val_loader": SimpleNamespace(source=range(50_000)), "job": JOB}
    return SimpleNamespace(**whole, step=step, run_dir=run_dir)


class Shown:
    """A display of an ImageNet run, and what it prints."""

    def __init__(self, width=200, *, bar=False, memory=None, **where):
        self.console = Console(
            file=io.StringIO(), width=width, force_terminal=bar, force_interactive=bar,
            color_system=None, highlight=False, soft_wrap=True, _environ={},
        )  # fmt: skip
        self.display = Display(True, console=self.console, now=lambda: self.now)
        self.said = []
        self.display.say = self.said.append
        self.display.start(imagenet(**where))
        self.display._memory = memory  # of the GPU

    step, now = 0, 0.0

    def trains(self, step):
        """Let the time pass that the steps up to this one take."""
        self.now += READING["seconds"] / 5 * (step - self.step)
        self.step = step

    def bar(self):
        """The bar and what is below it, drawn once."""
        about = {"width": self.console.width, "color_system": None, "_environ": {}}
        frame = Console(file=io.StringIO(), **about)
        frame.print(self.display.bar.get_renderable())
        return frame.file.getvalue().rstrip()


def feed(shown, steps=(5, 10, 15, 20)):
    """Show some readings and evaluations."""
    display = shown.display
    for step in steps:
        shown.trains(step)
        display.metrics("train", step, step / 19.5, READING)
    shown.trains(78)
    shown.now += 12.34
    display.metrics("val", 78, 4.0, {"loss": 3.5, "top1": 30.25, "seconds": 12.34})
    shown.now += 4.0
    shown.trains(156)
    values = {"loss": 1.5, "top1": 29.0, "ema_top1": 31.0, "seconds": 12.34}
    display.metrics("val", 156, 8.0, values)
    shown.trains(160)
    display.metrics("train", 160, 8.2, READING, "rank 5")


def test_lines_and_bars(golden):
    shown = {}
    lines = Shown()
    feed(lines)
    stopped = {key: value for key, value in READING.items() if key != "top1"}
    slow = {"images_per_second": 3.26, "lr": 1e-4, "loss": float("nan")}
    lines.display.metrics("train", 163, 8.36, stopped)
    lines.display.metrics("train", 1740, 88.98, {**READING, **slow, "memory_bytes": 250e9})
    shown["lines in a file"] = "\n".join(lines.said)
    for width in (40, 80, 120):
        bar = Shown(width, bar=True, memory=85_017_493_504)
        frames = [bar.bar()]
        for _ in range(160):
            bar.display.advance()
        feed(bar)
        frames.append(bar.bar())
        bar.display.stop()
        assert all(len(line) <= width for frame in frames for line in frame.splitlines())
        shown[f"a terminal of {width} columns"] = "\n".join([*bar.said, *frames])
    golden("console", shown)


def test_a_run_shows_all_its_readings_and_evaluations(photos, tmp_path, capsys, monkeypatch):
    keys = "epochs=1", "schedule.warmup=0", "log_every=1", "track=[]"
    make(photos, tmp_path, *keys).run()
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split() for line in lines if line.startswith(("train ", "val "))]
    metrics = read_metrics(tmp_path)
    assert [words[0] for words in shown] == [line["split"] for line in metrics]
    assert [int(words[4]) for words in shown] == [line["step"] for line in metrics]
    assert ["left" in words for words in shown] == [False, True, True, True]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    make(photos, tmp_path / "bar", *keys).run()
    written = capsys.readouterr().out
    assert "3/3" in written  # the bar
    assert (written.count("train  epoch"), written.count("val    epoch")) == (0, 1)


def test_the_best_evaluation_of_a_resumed_run_is_that_of_all_its_parts(tmp_path):
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for n, line in enumerate(({"top1": None}, {}, {"top1": 99.5}), 1):
            print(json.dumps({"split": "val", "step": n, "epoch": n / 2, **line}), file=file)
    shown = Shown(run_dir=tmp_path, step=3)
    shown.display.metrics("val", 4, 2.0, {"loss": 1.0, "top1": 30.0, "seconds": 1.0})
    assert "best  99.50% at epoch 1.50" in shown.said[0]


DIVERGING = ["optimizer.name=sgd", "optimizer.lr=1e30", "schedule.warmup=0", "schedule.end=1e30"]


def test_quiet_shows_warnings_and_errors_alone(photos, tmp_path, capsys):
    def shown(data, *keys):
        """What a quiet run shows, and its exit code."""
        code, run_dir = 0, f"run_dir={tmp_path}/{len(keys)}"
        try:
            main(["digits", *BASE, *keys, f"data.path={data}", run_dir, "--quiet"])
        except SystemExit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        assert out == ""
        return err, code

    damaged, skips = tmp_path / "damaged", ["data.on_error=skip", "epochs=1"]
    shutil.copytree(photos, damaged)
    (damaged / "train" / "ant" / "000.JPEG").write_bytes(b"not an image")
    warned, code = shown(damaged, *skips)
    assert re.fullmatch(r"largebatch: warning: skipped \S*train/ant/000.JPEG: .+\n", warned)
    assert code == 0
    error, code = shown(photos, *DIVERGING)
    assert re.fullmatch(r"largebatch: error: training diverged: the loss is .+\n", error)
    assert code == 1
    # A run within another command shows no warnings either.
    keys = [*BASE, f"data.path={damaged}", f"run_dir={tmp_path}/inner", *skips]
    Trainer.of(load("digits", keys), JOB, quiet=True, warns=False).run()
    assert tuple(capsys.readouterr()) == ("", "")
