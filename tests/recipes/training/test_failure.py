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
import faulthandler, os, sys, traceback
from functools import partial
from pathlib import Path
from largebatch.recipes.train import main
from largebatch.recipes.training import stopping

faulthandler.dump_traceback_later(200, file=open(f"stacks-{os.getpid()}", "w"))
stopping.StallWatch = partial(stopping.StallWatch, floor_seconds=4, grace_seconds=6)
Path("pid-" + os.environ["RANK"]).write_text(str(os.getpid()))
try:
    main(sys.argv[1:])
except Exception:  # which a forked rank would not print
    traceback.print_exc()
    raise
"""


def until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_lost_rank_is_named_and_the_run_is_resumed(photos, tmp_path):
    (tmp_path / "job.py").write_text(SCRIPT)
    arguments = ["digits", *BASE, f"data.path={photos}"]
    arguments += ["run_dir=run", "resume=true", "batch_size=12", "epochs=16"]
    arguments += ["checkpoint.every=2ep", "comm.ranks_per_node=1", "comm.algorithm=leader"]
    arguments += ["evaluate_every=null"]
    out = tmp_path / "out"
    job = torchrun(tmp_path / "job.py", arguments, out, ranks=3, restarts=1)
    try:
        until(
            lambda: any(tmp_path.glob("run/checkpoints/step-*/state.json")) or not job.is_alive(),
            120,
        )
        assert job.is_alive(), out.read_text()[-3000:]
        victim = int((tmp_path / "pid-1").read_text())
        os.kill(victim, signal.SIGKILL)
        job.join(300)
        returned = job.exitcode
    finally:
        job.terminate()
        job.join()
    output = out.read_text()
    stacks = [path.read_text() for path in sorted(tmp_path.glob("stacks-*"))]
    assert returned == 0, "\n".join([output[-6000:], *stacks])
    said = [line for line in output.splitlines() if line.startswith("largebatch: error: ")]
    assert len(said) == 1
    start = "largebatch: error: rank 1 did not answer within 3 s (ended or hanging); the newest "
    assert said[0].startswith(f"{start}checkpoint is run/checkpoints/step-")
    assert "\nTraceback" not in output  # torchrun indents that of its own
    assert "third_party/gloo" not in output
    assert "rank 1 did not answer within" in output
    assert "resumed from run/checkpoints/" in output
    steps = json.loads((tmp_path / "run/summary.json").read_text())["total_steps"]
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == steps
