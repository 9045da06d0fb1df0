"""A rank of the trainer is killed: it is named, and torchrun resumes the run."""

import json
import os
import signal
import time

import pytest

from tests.ranks import torchrun
from tests.recipes.runs import BASE

pytestmark = pytest.mark.slow("torchrun starts three ranks")

SCRIPT = """
import os, sys, traceback
from functools import partial
from pathlib import Path
from largebatch.recipes.train import main
from largebatch.recipes.training import stopping

stopping.StallWatch = partial(stopping.StallWatch, floor_seconds=4, grace_seconds=6)
Path("pid-" + os.environ["RANK"]).write_text(str(os.getpid()))
try:
    main(sys.argv[1:])
except Exception:  # which a forked rank would not print
    traceback.print_exc()
    raise
"""


def test_a_lost_rank_is_named_and_the_run_is_resumed(photos, tmp_path):
    (tmp_path / "job.py").write_text(SCRIPT)
    arguments = ["digits", *BASE, f"data.path={photos}"]
    arguments += ["run_dir=run", "resume=true", "batch_size=12", "epochs=16"]
    arguments += ["checkpoint.every=2ep", "comm.ranks_per_node=1", "comm.algorithm=leader"]
    arguments += ["evaluate_every=null"]
    out = tmp_path / "out"
    job = torchrun(tmp_path / "job.py", arguments, out, ranks=3, restarts=1)
    try:
        end = time.monotonic() + 120
        while not any(tmp_path.glob("run/checkpoints/step-*/state.json")):
            assert job.is_alive(), out.read_text()[-3000:]
            assert time.monotonic() < end
            time.sleep(0.05)
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        job.join(300)
        returned = job.exitcode
    finally:
        job.terminate()
        job.join()
    output = out.read_text()
    assert returned == 0, output[-6000:]
    (said,) = (line for line in output.splitlines() if line.startswith("largebatch: error: "))
    problem = "rank 1 did not answer within 3 s (ended or hanging); the newest checkpoint is run/"
    assert said.startswith(f"largebatch: error: {problem}checkpoints/step-")
    assert "\nTraceback" not in output  # torchrun indents that of its own
    assert "resumed from run/checkpoints/" in output
    steps = json.loads((tmp_path / "run/summary.json").read_text())["total_steps"]
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == steps
