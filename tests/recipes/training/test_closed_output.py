"""A run goes on when nobody reads its output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.runs import BASE

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}

PROGRAM = """
import os, sys
from largebatch.recipes.training.process import going_on

with going_on():
    print("before", flush=True)
    sys.stdin.readline()  # until nobody reads
    for stream in (sys.stdout, sys.stderr):
        print("after", file=stream, flush=True)
        os.write(stream.fileno(), b"of C\\n")
"""


@pytest.mark.parametrize("closes", ["standard error", "both"])
def test_what_nobody_reads_ends_nothing(closes):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout.readline() == "before\n"
    streams = {"standard output": process.stdout, "standard error": process.stderr}
    closed = {n: s for n, s in streams.items() if closes in (n, "both")}
    for stream in closed.values():
        stream.close()
    process.stdin.write("\n")
    process.stdin.close()
    for stream in [s for n, s in streams.items() if n not in closed]:
        assert stream.read() == "after\nof C\n"
    assert process.wait(60) == 0


@pytest.mark.slow("trains in a new process")
def test_a_run_whose_first_line_alone_is_read_goes_on(photos, tmp_path):
    words = ["train", "digits", *BASE, f"data.path={photos}", "epochs=1", f"run_dir={tmp_path}/run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "largebatch.recipes", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0, error
    assert (tmp_path / "run" / "summary.json").exists()
