"""A rank of the trainer is killed: the others name it, and torchrun resumes the run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.recipes.runs import BASE


def ranks_of(torchrun):
    """The process of each rank."""
    found = {}
    for child in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        for word in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            if word.startswith(b"RANK="):
                found[int(word[5:])] = int(child)
    return found


def until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_killed_rank_is_named_and_the_run_is_resumed(photos, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "3", "--max-restarts", "1"]
    command += ["-m", "largebatch.recipes.train", "digits", *BASE, f"data.path={photos}"]
    command += ["run_dir=run", "resume=true", "batch_size=12", "epochs=16", "evaluate_every=null"]
    command += ["checkpoint.every=2ep", "comm.ranks_per_node=1", "comm.algorithm=leader"]
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    with open(tmp_path / "out", "w") as out:
        job = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=out)
        try:
            until(
                lambda: (
                    any(tmp_path.glob("run/checkpoints/step-*/state.json"))
                    or job.poll() is not None
                ),
                120,
            )
            assert job.poll() is None, (tmp_path / "out").read_text()[-3000:]
            os.kill(ranks_of(job.pid)[1], signal.SIGKILL)
            returned = job.wait(120)
        finally:
            job.terminate()
            job.wait()
    output = (tmp_path / "out").read_text()
    assert returned == 0, output[-3000:]
    for rank in (0, 2):
        assert f"CollectiveError: rank {rank}: " in output
    assert "rank 1 did not answer within" in output
    assert "resumed from run/checkpoints/" in output
    steps = json.loads((tmp_path / "run/summary.json").read_text())["total_steps"]
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == steps
