"""Of several ranks that find the same error, one reports it, and the others wait for that.

torchrun ends all ranks as soon as one has ended: a rank that ended at once, silently, would end the
one that is about to report, and the command would fail without a word.
"""

import signal

import pytest

from largebatch.recipes.training import process
from tests.recipes.commands.test_app import run

BAD_INPUT = [
    (["comm", "tune", "--out", "plan.json", "--wire", "int4"], "--wire: unknown dtype 'int4'"),
    (
        ["comm", "tune", "--out", "plan.json", "--ranks-per-node", "3"],
        "ranks_per_node: 2 ranks cannot be split",
    ),
    (["tune", "lr", "digits", "epochs=-1"], "epochs: "),
    (["tune", "lr", "digits", "optimizer.lrr=1"], "optimizer.lrr"),
    (["critical-batch", "digits", "--rule", "cube"], "--rule: unknown: 'cube'"),
    (["evaluate", "nowhere"], "nowhere"),
]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_the_first_rank_reports_and_the_other_waits(monkeypatch, arguments, message, rank):

    def ended_by_torchrun(seconds):
        raise SystemExit(128 + signal.SIGTERM)

    monkeypatch.setattr(process.time, "sleep", ended_by_torchrun)
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    result = run(*arguments)
    assert result.exit_code == (2 if rank == 0 else 128 + signal.SIGTERM)
    assert (message in result.output) is (rank == 0)
