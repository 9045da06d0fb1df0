"""What a run shows: on terminals of several widths, in a file, and with --quiet."""

import fcntl
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch

from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
from largebatch.recipes.train import main
from largebatch.recipes.training.console import Display
from largebatch.recipes.training.metrics import read_metrics
from largebatch.recipes.training.trainer import Trainer
from tests.ranks import start_module
from tests.recipes.runs import BASE, make
from tests.recipes.test_train import SYNTHETIC, start

EACH_STEP = ("log_every=1", "track=[]")


class Screen:
    """A terminal: the rows that it shows in the end, and what it had to wrap.

    Attributes:
        wrapped: The rows that were full when more followed.
    """

    def __init__(self, width: int) -> None:
        self._width, self._rows, self._row, self._column = width, [[]], 0, 0
        self.wrapped: list[str] = []

    def write(self, text: str) -> None:
        for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]", text):
            if token == "\r":
                self._column = 0
            elif token == "\n":
                self._down()
            elif token.endswith("A") and token.startswith("\x1b"):
                self._row -= int(token[2:-1] or 1)
            elif token == "\x1b[2K":
                self._rows[self._row] = []
            elif not token.startswith("\x1b"):
                self._put(token)

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append([])

    def _put(self, character: str) -> None:
        if self._column == self._width:
            self.wrapped.append("".join(self._rows[self._row]))
            self._down()
            self._column = 0
        row = self._rows[self._row]
        row.extend(" " * (self._column + 1 - len(row)))
        row[self._column] = character
        self._column += 1

    @property
    def rows(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._rows]


def on_terminal(width, arguments, folder, **environment):
    """Run the trainer on a terminal of this width; give what it wrote, and its exit code."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    process = start_module(
        "largebatch.recipes.train",
        arguments,
        Path(os.ttyname(slave)),
        cwd=folder,
        environment={"TERM": "xterm-256color", "COLUMNS": "", **environment},
    )
    written = b""
    while process.is_alive() or select.select([master], [], [], 0)[0]:
        if select.select([master], [], [], 0.1)[0]:
            written += os.read(master, 1 << 16)
    os.close(slave)
    os.close(master)
    return written.decode(), process.exitcode


@pytest.fixture(scope="module")
def damaged(photos, tmp_path_factory):
    """The photos, one of which cannot be decoded."""
    folder = tmp_path_factory.mktemp("damaged") / "photos"
    shutil.copytree(photos, folder)
    (folder / "train" / "ant" / "000.JPEG").write_bytes(b"not an image")
    return folder


@pytest.mark.slow("a process that imports torch for each width")
@pytest.mark.parametrize(
    ("width", "environment"), [(40, {}), (80, {"NO_COLOR": "1"}), (120, {})], ids=[40, 80, 120]
)
def test_a_terminal_shows_a_bar_that_fits(damaged, tmp_path, width, environment):
    keys = [*BASE, *EACH_STEP, f"data.path={damaged}", "run_dir=run", "data.on_error=skip"]
    written, code = on_terminal(width, ["digits", *keys], tmp_path, **environment)
    assert code == 0, written
    screen = Screen(width)
    screen.write(written)
    rows = screen.rows
    assert not [row for row in screen.wrapped if row.startswith(("step", "epoch", "val", "loss"))]
    (bar,) = [number for number, row in enumerate(rows) if row.startswith("step")]
    assert rows[bar].startswith("step 7/7 ")
    assert re.search(r"left \d+s$", rows[bar])
    assert len(rows[bar]) == width
    last = read_metrics(tmp_path / "run")[-2]
    assert last["split"] == "train"
    assert f"loss {last['loss']:6.3f}  top-1 {last['top1']:6.2f}%" in rows[bar + 1]
    assert ("images/s" in rows[bar + 1]) == (width > 40)
    assert (" GB" in rows[bar + 1]) == (width > 80)
    evaluations = [row for row in rows if row.startswith("val ")]
    assert len(evaluations) == 2
    metrics = [line for line in read_metrics(tmp_path / "run") if line["split"] == "val"]
    for row, line in zip(evaluations, metrics, strict=True):
        assert f"loss {line['loss']:6.3f}  top-1 {line['top1']:6.2f}%" in row
        assert ("best" in row) == (width > 40)
    assert rows.index(evaluations[-1]) < bar  # lines go above the bar
    (warning,) = [n for n, row in enumerate(rows) if row.startswith("largebatch: warning: skipped")]
    assert warning < bar
    colours = re.findall(r"\x1b\[(?:[\d;]*;)?(?:3[0-8]|9[0-7])[\d;]*m", written)
    assert bool(colours) is not bool(environment)


def columns(line):
    return [line.index(label) for label in ("epoch", "step", "loss", "top-1")]


def test_elsewhere_there_are_plain_lines(photos, tmp_path, capsys):
    make(photos, tmp_path, *EACH_STEP).run()
    written = capsys.readouterr().out
    assert "\x1b" not in written
    assert "\r" not in written
    lines = [line for line in written.splitlines() if line.startswith(("train ", "val "))]
    metrics = read_metrics(tmp_path)
    assert [line.split()[0] for line in lines] == [line["split"] for line in metrics]
    assert len({tuple(columns(line)) for line in lines}) == 1
    train = [line for line in lines if line.startswith("train")]
    for label in ("lr", "images/s", "wait", " GB"):
        assert len({line.index(label) for line in train}) == 1, label
    assert [bool(re.search(r"  left +\d+s$", line)) for line in lines] == [False] + [True] * 8
    for shown, line in zip(lines, metrics, strict=True):
        assert f"step {line['step']}  loss {line['loss']:6.3f}" in shown
        if line["split"] == "train":
            assert f"wait {line['wait_seconds'] / line['seconds']:3.0%}  " in shown
            assert f"{line['memory_bytes'] / 1e9:4.1f} GB" in shown
    first, second = (line for line in metrics if line["split"] == "val")
    best = max((first, second), key=lambda line: line["top1"])
    shown = [line for line in lines if line.startswith("val")]
    assert f"best {first['top1']:6.2f}% at epoch {first['epoch']:.2f}  evaluated" in shown[0]
    assert f"best {best['top1']:6.2f}% at epoch {best['epoch']:.2f}  evaluated" in shown[1]


def test_the_best_evaluation_of_a_resumed_run_is_that_of_all_its_parts(photos, tmp_path, capsys):
    make(photos, tmp_path, "stop_after=4", "track=[]").run()
    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1] |= {"split": "val", "top1": 99.5}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    make(photos, tmp_path, "resume=true", "track=[]").run()
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("val ")]
    assert "best  99.50% at epoch 1.21" in shown[-1]


class Unknown:
    """A time left that is not known."""

    def trained(self, *_):
        pass

    def evaluated(self, *_):
        pass

    def seconds(self, step):
        return None

    def announcement(self, step, now):
        return None


@pytest.mark.parametrize(
    ("environment", "bar"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),  # as rich has it: output that is to be taken for a terminal
        ({"FORCE_COLOR": "1", "TTY_INTERACTIVE": "0"}, False),  # for logs of CI with colours
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, False),
        ({"NO_COLOR": "1"}, False),
        ({"CI": "true"}, False),
    ],
    ids=str,
)
def test_what_to_take_for_a_terminal_is_for_rich_to_say(monkeypatch, capsys, environment, bar):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    display = Display(shows=True, total_steps=7, epochs=2, time_left=Unknown())
    display.start(0, Path("nowhere"))
    values = {"loss": 1.0, "top1": 50.0, "lr": 0.1, "images_per_second": 10.0}
    display.metrics("train", 1, 0.3, {**values, "wait_seconds": 0.0, "seconds": 1.0})
    display.stop()
    written = capsys.readouterr().out
    assert ("0/7" in written) is bar
    assert written.startswith("train") is not bar


def test_evaluations_without_an_accuracy_do_not_count_for_the_best(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TTY_INTERACTIVE", "0")
    lines = [{"top1": None}, {}, {"top1": 40.0}]
    written = [json.dumps({"split": "val", "step": n, "epoch": n / 2, **line}) + "\n"
               for n, line in enumerate(lines, 1)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(written))
    display = Display(shows=True, total_steps=7, epochs=2, time_left=Unknown())
    display.start(3, tmp_path)
    display.metrics("val", 4, 2.0, {"loss": 1.0, "top1": 30.0, "seconds": 1.0})
    display.stop()
    assert "best  40.00% at epoch 1.50" in capsys.readouterr().out


def test_quiet_shows_nothing_of_a_run_that_goes_well(photos, tmp_path, capsys):
    main(["digits", *BASE, f"data.path={photos}", f"run_dir={tmp_path}", "--quiet"])
    assert tuple(capsys.readouterr()) == ("", "")
    assert len(read_metrics(tmp_path)) == 6


def test_quiet_shows_images_that_are_skipped(damaged, tmp_path, capsys):
    keys = [f"data.path={damaged}", f"run_dir={tmp_path}", "data.on_error=skip"]
    main(["digits", *BASE, *keys, "--quiet"])
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert re.fullmatch(r"largebatch: warning: skipped \S*train/ant/000.JPEG: .+", line)


def test_quiet_shows_why_a_run_diverged(photos, tmp_path, capsys):
    keys = [f"data.path={photos}", f"run_dir={tmp_path}", "optimizer.name=sgd"]
    diverging = ["optimizer.lr=1e30", "schedule.warmup=0", "schedule.end=1e30"]
    with pytest.raises(SystemExit) as ended:
        main(["digits", *BASE, *keys, *diverging, "--quiet"])
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("largebatch: error: training diverged: the loss is ")
    assert shown.err.count("\n") == 1


@pytest.mark.slow("torchrun starts two ranks")
def test_quiet_holds_for_all_ranks_that_the_command_starts(tmp_path):
    command = ("largebatch.recipes.commands.app", "train", "digits", "--nproc", "2", "--quiet")
    result = start(tmp_path, *command, *SYNTHETIC, "run_dir=run")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert (tmp_path / "run" / "weights.pt").exists()


@pytest.mark.slow("trains in a new process")
def test_a_run_within_another_command_shows_no_warnings_either(damaged, tmp_path, capsys):
    keys = [*BASE, f"data.path={damaged}", f"run_dir={tmp_path}", "data.on_error=skip"]
    loaded, job = load("digits", keys), Job(0, 1, 1, torch.device("cpu"))
    Trainer.of(loaded, job, quiet=True, warns=False).run()
    assert tuple(capsys.readouterr()) == ("", "")


@pytest.mark.slow("a process that imports torch")
def test_warnings_go_to_a_file_of_their_own_although_there_is_a_bar(tmp_path):
    """stdout is a terminal, and stderr a file."""
    program = (
        "from pathlib import Path; from largebatch.recipes.training.console import Display; "
        "display = Display(shows=True, total_steps=7, epochs=2, time_left=None); "
        "display.start(0, Path('nowhere')); display.warn('the disk is full'); display.stop()"
    )
    master, slave = pty.openpty()
    with open(tmp_path / "err", "wb") as err:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}
        command = [sys.executable, "-c", program]
        subprocess.run(command, stdout=slave, stderr=err, env=environment, check=True)
    os.close(slave)
    assert "0/7" in os.read(master, 1 << 16).decode()
    os.close(master)
    assert (tmp_path / "err").read_text() == "largebatch: warning: the disk is full\n"
