"""Errors under torchrun: one rank prints one line, and torchrun's own report names the cause."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from largebatch.recipes.errors import AgreedError, LostRankError, RecipeError
from largebatch.recipes.training import process
from tests.recipes.runs import BASE

SYNTHETIC = [
    *(*BASE, "data.source=synthetic", "data.train_images=64", "data.val_images=0"),
    *("data.classes=4", "evaluate_every=null", "log_every=1", "schedule.warmup=0"),
]


def start(folder, module, *words):
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TMPDIR": str(folder),
    }
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow("torchrun starts two ranks")
def test_under_torchrun_one_rank_prints_one_line_which_is_the_root_cause(tmp_path):
    """The two ranks see the error each on its own, before they join."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    result = start(tmp_path, *torchrun, "-m", "largebatch.recipes.train", "digits", "device=cuda")
    assert result.returncode != 0
    message = "device: cuda, but this machine has no CUDA GPU; "
    ours = [x for x in result.stderr.splitlines() if x.startswith("largebatch: error: ")]
    assert len(ours) == 1
    assert ours[0].startswith(f"largebatch: error: {message}")
    # What follows is torchrun's own, of which only the end can be had from here.
    before, _, after = result.stderr.partition(ours[0])
    assert "Traceback" not in before
    root = after.partition("Root Cause")[2]  # the other rank was ended by torchrun
    assert message in root
    assert "To enable traceback" not in root
    assert after.count("Traceback") == 1


@pytest.mark.slow("torchrun starts two ranks")
def test_started_by_the_command_torchrun_adds_nothing(tmp_path):
    """The two ranks diverge together, which only the run can find."""
    diverging = ["optimizer.name=sgd", "optimizer.lr=1e30", "schedule.end=1e30"]
    result = start(
        tmp_path, "largebatch.recipes", "train", "digits", "--nproc", "2",
        *SYNTHETIC, *diverging, "run_dir=run",
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("largebatch: error: training diverged: the loss is nan at step")


@pytest.mark.parametrize(
    ("error", "reports", "reported"),
    [
        (RecipeError("seed: no"), True, "seed: no"),
        (KeyError("seed"), True, "KeyError: 'seed'"),
        (KeyError("seed"), False, "KeyError: 'seed'"),
        (AgreedError("seed: no"), False, "seed: no"),  # once it has waited in vain
        (LostRankError("seed: no", True), True, "seed: no"),
        (LostRankError("seed: no", False), False, None),  # torchrun is ending it
    ],
)
def test_the_rank_that_reports_writes_the_cause_and_the_others_wait(
    tmp_path, monkeypatch, capsys, error, reports, reported
):
    waited = []
    monkeypatch.setattr(process.time, "sleep", waited.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    expected = SystemExit if isinstance(error, RecipeError) else KeyError
    with pytest.raises(expected), process.reported_once(lambda _: reports):
        raise error
    assert bool(waited) is isinstance(error, AgreedError)
    found = tmp_path / "error.json"
    said = json.loads(found.read_text())["message"]["message"] if found.exists() else None
    assert said == reported
    printed = "largebatch: error: seed: no\n" if expected is SystemExit and reported else ""
    assert capsys.readouterr().err == printed


def test_a_full_disk_leaves_the_one_line_of_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere" / "error.json"))
    with pytest.raises(SystemExit), process.reported_once(lambda _: True):
        raise RecipeError("seed: no")
    assert capsys.readouterr().err == "largebatch: error: seed: no\n"
