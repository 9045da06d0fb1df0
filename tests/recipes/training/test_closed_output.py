"""A run goes on when nobody reads its output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.runs import BASE

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}


@pytest.mark.slow("trains in a new process")
@pytest.mark.parametrize("error", [subprocess.PIPE, subprocess.STDOUT])
def test_a_run_whose_first_line_alone_is_read_goes_on(photos, tmp_path, error):
    words = ["train", "digits", *BASE, f"data.path={photos}", "epochs=1", f"run_dir={tmp_path}/run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "largebatch.recipes", *words],
        stdout=subprocess.PIPE,
        stderr=error,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout.readline()
    process.stdout.close()
    if process.stderr:
        assert process.stderr.read() == ""
        process.stderr.close()
    assert process.wait(60) == 0
    assert (tmp_path / "run" / "summary.json").exists()
