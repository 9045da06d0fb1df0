"""The process of a run: signals stop or end it, and output that nobody reads does not."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1, SIGXCPU

import pytest
import torch.distributed as dist

from largebatch.recipes.training.process import going_on
from tests.ranks import run_ranks
from tests.recipes.runs import BASE, assert_same, make, timeless, train

# --- runs that stop with a checkpoint ----------------------------------------------------------

OPTIONS = ("model.args.drop_rate=0.5", "log_every=2", "evaluate_every=3")


def raising(number, trainer, step, place):
    """Have a rank receive a signal in a micro-batch of a step."""
    original = trainer._take_step.forward_backward

    def forward_backward(images, labels, at, accumulation):
        if (trainer.step, at) == (step, place):
            signal.raise_signal(number)
        return original(images, labels, at, accumulation)

    trainer._take_step.forward_backward = forward_backward


def stopped(trainer, number):
    """Run until a signal stops it, and return the state of its checkpoint."""
    with pytest.raises(SystemExit) as exit_:
        trainer.run()
    assert exit_.value.code == 128 + number
    (path,) = (trainer.run_dir / "checkpoints").glob("step-*/state.json")
    return json.loads(path.read_text())


@pytest.mark.slow("trains, and resumes")
def test_a_rank_completes_the_step_that_it_has_begun(photos, tmp_path, capsys):
    whole = train(photos, tmp_path / "whole", *OPTIONS)
    # After an evaluation, and in a last micro-batch: the end is between two lines of metrics.
    for number, step, place in ((SIGHUP, 3, 2), (SIGUSR1, 4, 3)):
        trainer = make(photos, tmp_path / number.name, *OPTIONS)
        assert trainer.loader.accumulation == 4
        raising(number, trainer, step, place)
        state = stopped(trainer, number)
        assert state["step"] == step + 1
        assert state["loader"]["position"] == 16 * state["step"]
        assert f"{number.name}: the run stops with a checkpoint" in capsys.readouterr().err
        assert_same(train(photos, trainer.run_dir, *OPTIONS, "resume=true"), whole)
        assert timeless(trainer.run_dir) == timeless(tmp_path / "whole")


def one_rank_is_told(root, folder):
    options = (*OPTIONS, "batch_size=8", "micro_batch_size=2", "epochs=1", "evaluate_every=null")
    expected = train(root, folder / "whole", *options)
    trainer = make(root, folder / "run", *options)
    if dist.get_rank() == 1:
        raising(SIGTERM, trainer, 1, 0)
    step = stopped(trainer, SIGTERM)["step"]
    assert_same(train(root, folder / "run", *options, "resume=true"), expected)
    return step


@pytest.mark.slow("trains and resumes on 2 ranks")
def test_ranks_stop_after_the_same_step_whichever_is_told(photos, tmp_path):
    # It comes in the second step, and all know two steps later.
    assert run_ranks(2, one_rank_is_told, photos, tmp_path) == [4, 4]


# --- processes -------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
from largebatch.recipes.training.process import STOPPING, ending_in_one_line, noted

def wait():
    print("ready", flush=True)
    while True:  # in short sleeps, as one that begins after a signal is not interrupted by it
        time.sleep(0.05)

def note(number):
    print("noted", number, flush=True)

def start():
    with ending_in_one_line():
        wait()

def loop():
    with noted(note):
        wait()

def results():
    with ending_in_one_line():
        with noted(note):
            pass
        wait()

# Whatever the tests' own process was started with.
for number in STOPPING:
    ignored = number.name in os.environ.get("IGNORED", "")
    signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
"""


@contextmanager
def started(*words, **environment):
    """Python in a process of its own, which is killed if it has not ended."""
    source = str(Path(__file__).parents[3] / "src")
    environment = {**os.environ, "PYTHONPATH": source, **environment}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *words], **streams, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


#: A function of the program, its environment, signals that end nothing, the one that then ends the
#: process, its exit code, and how the line begins that it writes.
ENDS = [
    ("start", {}, [], SIGUSR1, 128 + SIGUSR1, "ended by SIGUSR1 at start-up, "),
    # Rank 0 alone prints the line.
    ("start", {"RANK": "1"}, [], SIGTERM, 128 + SIGTERM, ""),
    ("results", {}, [], SIGTERM, 128 + SIGTERM, "ended by SIGTERM after training; "),
    # What was ignored at the start stays so.
    ("start", {"IGNORED": "SIGHUP SIGINT"}, [SIGHUP, SIGINT], SIGTERM, 128 + SIGTERM, "ended by"),
    # In training, the same signal a second time ends the process; the kernel repeats SIGXCPU.
    ("loop", {}, [SIGXCPU, SIGXCPU, SIGINT, SIGTERM], SIGINT, -SIGINT, ""),
    # What is sent twice may be passed on by torchrun.
    ("loop", {"TORCHELASTIC_RUN_ID": "job"}, [SIGTERM, SIGTERM, SIGUSR1], SIGKILL, -SIGKILL, ""),
]


@pytest.mark.parametrize(("name", "environment", "further", "number", "code", "line"), ENDS)
def test_a_signal_ends_the_process_in_a_line_or_is_noted(
    name, environment, further, number, code, line
):
    with started("-c", f"{PROGRAM}\n{name}()", **environment) as process:
        assert process.stdout.readline() == "ready\n"
        for one in further:
            process.send_signal(one)
            assert name != "loop" or process.stdout.readline() == f"noted {int(one)}\n"
        process.send_signal(number)
        _, error = process.communicate(timeout=300)
    assert process.returncode == code
    assert error.startswith(f"largebatch: error: {line}" if line else "")
    assert len(error.splitlines()) == error.count("\n") == bool(line)


def test_a_signal_while_the_program_imports_torch_ends_it_in_one_line():
    program = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "largebatch.recipes.ranks":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["train", "digits"]
runpy.run_module("largebatch.recipes.train", run_name="__main__", alter_sys=True)
"""
    with started("-c", program) as process:
        _, error = process.communicate(timeout=300)
    assert process.returncode == 128 + SIGINT
    assert error.count("\n") == 1
    assert "ended by SIGINT at start-up" in error


@pytest.mark.slow("trains in a new process")
def test_a_run_whose_first_line_alone_is_read_goes_on(photos, tmp_path, monkeypatch):
    words = ["train", "digits", *BASE, f"data.path={photos}", "epochs=1", f"run_dir={tmp_path}/run"]
    with started("-m", "largebatch.recipes", *words) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(300) == 0
    assert (tmp_path / "run" / "summary.json").exists()
    monkeypatch.setattr(sys, "stdout", None)  # as where it was closed before the start
    with going_on():
        pass
