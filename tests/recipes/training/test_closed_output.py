"""A run goes on when nobody reads its output, and says so in its folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from largebatch.recipes.training.process import OUTPUT
from tests.recipes.runs import BASE

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}

PROGRAM = """
import sys
from pathlib import Path
from largebatch.recipes.training.process import follow, going_on

with going_on():
    print("before", flush=True)
    sys.stdin.readline()  # until nobody reads
    for stream in (sys.stdout, sys.stderr):
        print("without a folder", file=stream, flush=True)
    follow(Path(sys.argv[1]))
    for stream in (sys.stdout, sys.stderr):
        print("with one", file=stream, flush=True)
"""


@pytest.mark.parametrize("closes", ["standard output", "standard error", "both", "none"])
def test_what_nobody_reads_goes_to_the_folder(tmp_path, closes):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
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
        assert stream.read() == "without a folder\nwith one\n"
    assert process.wait(60) == 0
    log = tmp_path / OUTPUT
    lines = log.read_text().splitlines() if closed else []
    assert log.exists() == bool(closed)
    assert sorted(lines) == sorted(
        line
        for name in closed
        for line in (
            f"largebatch: warning: nobody reads {name} any longer; the run goes on",
            "with one",
        )
    )


@pytest.mark.slow("trains in a new process")
def test_a_run_whose_first_line_alone_is_read_goes_on(photos, tmp_path):
    words = ["train", "digits", *BASE, f"data.path={photos}", "epochs=1", f"run_dir={tmp_path}/run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "largebatch.recipes.commands.app", *words],
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
    text = (tmp_path / "run" / OUTPUT).read_text()
    assert "nobody reads standard output any longer; the run goes on" in text
    assert "finished at step" in text
