"""Signals stop a run with a checkpoint that resumes bit for bit, and elsewhere end the process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from largebatch.recipes.training.folder.metrics import read_metrics
from tests.ranks import run_ranks
from tests.recipes.runs import assert_same, make, train, weights

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


def timeless(folder):
    lines = read_metrics(folder)
    return [
        {k: v for k, v in line.items() if "second" not in k and k != "memory_bytes"}
        for line in lines
    ]


@pytest.fixture(scope="module")
def whole(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return train(photos, folder, *OPTIONS), timeless(folder)


@pytest.mark.slow("trains, and resumes")
@pytest.mark.parametrize(
    ("number", "step", "place"),
    [
        (signal.SIGHUP, 3, 2),
        (signal.SIGUSR1, 5, 3),  # in the last micro-batch of the step before an evaluation
    ],
)
def test_a_rank_completes_the_step_that_it_has_begun(
    photos, tmp_path, capsys, whole, number, step, place
):
    trainer = make(photos, tmp_path / "run", *OPTIONS)
    assert trainer.loader.accumulation == 4
    raising(number, trainer, step, place)
    state = stopped(trainer, number)
    assert state["step"] == step + 1
    assert state["loader"]["position"] == 16 * state["step"]
    assert f"{number.name}: the run stops with a checkpoint" in capsys.readouterr().err
    resumed = make(photos, tmp_path / "run", *OPTIONS, "resume=true")
    resumed.run()
    assert_same(weights(resumed), whole[0])
    assert timeless(tmp_path / "run") == whole[1]


def one_rank_is_told(root, folder):
    options = (*OPTIONS, "batch_size=8", "micro_batch_size=2", "epochs=1", "evaluate_every=null")
    expected = train(root, folder / "whole", *options)
    trainer = make(root, folder / "run", *options)
    if dist.get_rank() == 1:
        raising(signal.SIGTERM, trainer, 1, 0)
    step = stopped(trainer, signal.SIGTERM)["step"]
    resumed = make(root, folder / "run", *options, "resume=true")
    resumed.run()
    assert_same(weights(resumed), expected)
    return step


@pytest.mark.slow("trains and resumes on 2 ranks")
def test_ranks_stop_after_the_same_step_whichever_is_told(photos, tmp_path):
    first, second = run_ranks(2, one_rank_is_told, photos, tmp_path)
    # It comes in the second step, and all know two steps later.
    assert first == second == 4


# --- processes -------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
from largebatch.recipes.training.process import STOPPING, ending_in_one_line, noted

def wait():
    print("ready", flush=True)
    while True:
        time.sleep(60)

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

def forked():
    with noted(note):
        child = os.fork()
        if child == 0:
            print(os.getpid(), flush=True)
            wait()
        print("ended by", -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

# Whatever the tests' own process was started with.
for number in STOPPING:
    signal.signal(number, signal.SIG_IGN if str(int(number)) in sys.argv[2:] else signal.SIG_DFL)
globals()[sys.argv[1]]()
"""


class Program:
    """One of the functions above, in a process of its own."""

    def __init__(self, name, *, ignored=(), **environment):
        place = str(Path(__file__).parents[3] / "src")
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, name, *(str(int(number)) for number in ignored)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": place, **environment},
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate()

    def says(self, line):
        assert self.process.stdout.readline() == line + "\n"

    def send(self, number):
        self.process.send_signal(number)

    def ends(self):
        """Return the exit code, and what it wrote to standard error."""
        _, error = self.process.communicate(timeout=60)
        return self.process.returncode, error


@pytest.mark.parametrize(
    ("name", "number", "environment", "line"),
    [
        ("start", signal.SIGUSR1, {}, "ended by {} at start-up, "),
        ("start", signal.SIGTERM, {"RANK": "1"}, ""),  # rank 0 alone prints it
        ("results", signal.SIGTERM, {}, "ended by {} after training; "),
    ],
)
def test_outside_of_training_a_signal_ends_the_process_in_one_line(name, number, environment, line):
    with Program(name, **environment) as program:
        program.says("ready")
        program.send(number)
        code, error = program.ends()
    assert code == 128 + number
    assert error.startswith(f"largebatch: error: {line.format(number.name)}" if line else "")
    assert len(error.splitlines()) == error.count("\n") == bool(line)


def test_in_training_the_same_signal_a_second_time_ends_the_process():
    with Program("loop") as program:
        program.says("ready")
        for number in (signal.SIGINT, signal.SIGTERM):  # another one is no second time
            program.send(number)
            program.says(f"noted {int(number)}")
        program.send(signal.SIGINT)
        assert program.ends() == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("number", "environment"),
    [
        (signal.SIGXCPU, {}),  # which the kernel repeats
        (signal.SIGTERM, {"TORCHELASTIC_RUN_ID": "job"}),  # which torchrun passes on
    ],
)
def test_what_is_sent_twice_for_one_request_ends_nothing(number, environment):
    with Program("loop", **environment) as program:
        program.says("ready")
        for _ in range(2):
            program.send(number)
            program.says(f"noted {int(number)}")
        program.send(signal.SIGUSR1)
        program.says(f"noted {int(signal.SIGUSR1)}")


def test_what_is_ignored_at_the_start_stays_ignored():
    with Program("start", ignored=[signal.SIGHUP, signal.SIGINT]) as program:
        program.says("ready")
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            program.send(number)
        code, error = program.ends()
        assert (code, "SIGTERM" in error) == (128 + signal.SIGTERM, True)


def test_a_forked_child_ends_by_the_signal_and_its_parent_does_not_hear_of_it():
    with Program("forked") as program:
        child = int(program.process.stdout.readline())
        program.says("ready")
        os.kill(child, signal.SIGTERM)
        program.says(f"ended by {int(signal.SIGTERM)}")
        assert program.ends() == (0, "")


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
    place = str(Path(__file__).parents[3] / "src")
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": place},
    )
    assert result.returncode == 128 + signal.SIGINT
    assert result.stderr.count("\n") == 1
    assert "ended by SIGINT at start-up" in result.stderr
