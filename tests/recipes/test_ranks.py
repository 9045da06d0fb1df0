"""The processes of a job: threads, errors on all ranks, and leaving the process group."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
import torch.distributed as dist

from largebatch.comm import CollectiveError
from largebatch.recipes import ranks as job
from largebatch.recipes.errors import AgreedError, LostRankError, RecipeError
from largebatch.recipes.schema.load import load
from largebatch.recipes.train import main
from largebatch.recipes.training.folder import place as run_folder
from tests.ranks import run_ranks

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, 4),
        ({"OMP_NUM_THREADS": "1"}, None),
        ({"OMP_NUM_THREADS": "3"}, None),
        (TORCHRUN | {"OMP_NUM_THREADS": "1"}, 2),  # set by torchrun, and not by the user
        (TORCHRUN | {"OMP_NUM_THREADS": "3"}, None),
    ],
    ids=str,
)
def test_a_process_uses_its_share_of_the_cores_by_default(monkeypatch, environment, threads):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    for name in ("OMP_NUM_THREADS", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with job.joined(load("digits", ["device=cpu"]).recipe):
        assert chosen == ([] if threads is None else [threads])


@pytest.mark.parametrize(
    ("keys", "ranks", "own", "order"),
    [
        (["comm.algorithm=ring"], 16, None, None),
        (["comm.algorithm=null"], 16, None, None),
        (["comm.algorithm=leader"], 16, None, "1"),
        (["comm.algorithm=leader"], 16, "0", "0"),
        (["comm.algorithm=null", "comm.plan=plan.json"], 8, None, "1"),
        (["comm.algorithm=auto"], 16, None, "1"),
        (["comm.algorithm=auto"], 8, None, None),  # one node
        (["comm.algorithm=auto", "comm.ranks_per_node=4"], 8, None, "1"),
        (["comm.algorithm=ring", "batch_norm.ranks=all"], 8, None, "1"),
    ],
    ids=str,
)
def test_nccl_is_told_to_keep_the_order_before_it_starts(monkeypatch, keys, ranks, own, order):
    """It reads the variable once; see largebatch.comm.launch_order."""
    seen = []
    monkeypatch.setattr(job, "device_of", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(job, "rendezvous", lambda _: None)

    def init_process_group(*arguments, **options):
        seen.append(os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT"))
        assert options["timeout"].total_seconds() == 77
        raise RecipeError("far enough")

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", own or "")
    if own is None:
        monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")
    for name, value in {"RANK": "0", "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    common = ["comm.ranks_per_node=null", "comm.timeout_seconds=77"]
    recipe = load("digits", [*common, *keys]).recipe
    with pytest.raises(RecipeError, match="far enough"), job.joined(recipe):
        pass
    assert seen == [order]


def this_job():
    return job.Job(dist.get_rank(), dist.get_world_size(), 1, torch.device("cpu"))


def fail_on_rank_1(error):
    try:
        with this_job().raise_on_all_ranks():
            if dist.get_rank() == 1:
                raise error
    except Exception as raised:
        return type(raised).__name__, str(raised)


@pytest.mark.slow("starts ranks")
@pytest.mark.parametrize(
    ("error", "own", "others"),
    [
        (RecipeError("seed: no"), ("AgreedError", "rank 1: seed: no"), "rank 1: seed: no"),
        (KeyError("seed"), ("KeyError", "'seed'"), "rank 1: KeyError: 'seed'"),
    ],
    ids=["of the user", "of the program"],
)
def test_an_error_of_one_rank_is_raised_on_all_of_them(error, own, others):
    assert run_ranks(2, fail_on_rank_1, error) == [("AgreedError", others), own]


def leave(folder, error, fails):
    """Whether rank 0 had written what it writes at the end when this rank left."""
    rank, written = dist.get_rank(), folder / "written"
    with suppress(type(error)), this_job().main_ends_first():
        if rank == 0:
            if fails:
                dist.distributed_c10d._get_default_store().wait(["rank 1 has left"])
            time.sleep(0.5)
            written.touch()
        if error:
            raise error
    found = written.exists()
    if fails and rank == 1:
        dist.distributed_c10d._get_default_store().set("rank 1 has left", "")
    return found


@pytest.mark.slow("starts ranks")
@pytest.mark.parametrize(
    ("error", "fails"),
    [(None, False), (AgreedError("all"), False), (SystemExit(143), False), (KeyError("x"), True)],
    ids=repr,
)
def test_rank_0_ends_a_run_before_the_others_unless_it_failed_alone(tmp_path, error, fails):
    assert run_ranks(2, leave, tmp_path, error, fails) == [True, not fails]


@pytest.mark.parametrize("error", [None, AgreedError("all"), RecipeError("one")], ids=repr)
def test_ranks_that_agree_on_an_error_leave_in_good_order(monkeypatch, error):
    """A rank that leaves in good order is not named as missing."""
    left = []

    @contextmanager
    def roll_call():
        try:
            yield
            left.append("in good order")
        except RecipeError:
            left.append("by an error")
            raise

    monkeypatch.setattr(job, "missing_ranks_named", roll_call)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    raised = pytest.raises(type(error), match=str(error)) if error else nullcontext()
    with raised, job.joined(load("digits", ["device=cpu"]).recipe):
        if error:
            raise error
    assert left == ["by an error" if str(error) == "one" else "in good order"]


@pytest.mark.parametrize(
    ("error", "missing", "line"),
    [
        (RuntimeError("Connection closed by peer"), [1], "rank 1 is away; goes on"),
        (CollectiveError("rank 2: ring failed"), [3], "rank 3 is away; goes on"),
        (dist.DistBackendError("NCCL error"), [1], "rank 1 is away; goes on"),
        (RuntimeError("sizes do not match"), [], None),
        (torch.OutOfMemoryError("no memory"), [1], None),
        (KeyError("seed"), [1], None),
    ],
    ids=repr,
)
def test_the_error_of_a_collective_becomes_one_line_if_ranks_are_missing(
    monkeypatch, error, missing, line
):
    """An error of this rank itself stays, whoever else has ended."""
    complete = CollectiveError("third_party/gloo: closed")
    complete.ranks, complete.missing = missing, missing and f"rank {missing[0]} is away"
    monkeypatch.setattr(job, "with_missing_ranks", lambda error: complete if missing else error)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    expected = LostRankError if line else type(error)
    with pytest.raises(expected) as raised, job.lost_ranks_named(lambda: "goes on"):
        raise error
    assert raised.type is expected
    if line:
        assert str(raised.value) == line
        assert raised.value.is_first == (missing == [1])  # rank 1 is that of LOCAL_RANK 0
    else:
        assert raised.value is error


@pytest.mark.parametrize(
    ("back_end", "error", "destroyed"),
    [
        ("ProcessGroupNCCL", None, True),
        ("ProcessGroupNCCL2", AgreedError("all"), True),
        ("ProcessGroupNCCL2", SystemExit(143), True),
        ("ProcessGroupNCCL", RecipeError("one"), False),  # others are still in a collective
        ("ProcessGroupNCCL2", MemoryError(), False),
        ("", MemoryError(), True),
    ],
)
def test_a_rank_that_fails_alone_on_nccl_does_not_destroy_the_group(
    monkeypatch, back_end, error, destroyed
):
    calls = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(1))
    monkeypatch.setattr(job, "nccl_class", lambda: back_end)
    with pytest.raises(type(error)) if error else nullcontext(), job.group_destroyed():
        if error:
            raise error
    assert calls == [1] * destroyed


def use_folder(own, folder):
    run_folder._PATIENCE_SECONDS = 0.1
    run_folder.check_shared(folder, this_job())
    with pytest.raises(AgreedError, match=r"rank 1: run_dir: .*/1/a is not the folder that rank"):
        run_folder.check_shared(own / str(dist.get_rank()) / "a", this_job())


def test_a_run_folder_that_machines_do_not_share_is_refused(tmp_path):
    run_ranks(2, use_folder, tmp_path, tmp_path / "shared")
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == [
        "0",
        "0/a",
        "shared",
    ]


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_a_machine_without_the_recipe_reports_it_once(monkeypatch, capsys, local_rank):
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit) as ended:
        main(["mine.yaml"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("mine.yaml") == (1 if local_rank == "0" else 0)


RANK = """
import time
from largebatch.recipes.launcher import ending_with_launcher
with ending_with_launcher():
    print("joins", flush=True)
    time.sleep(600)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_rank_that_joins_ends_with_its_launcher():
    """Its end of the pipe is closed when it ends."""
    command = [sys.executable, "-c", LAUNCHER, RANK]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert launcher.stdout.readline() == "joins\n"
    launcher.kill()
    output, error = launcher.communicate(timeout=120)
    assert (output, error) == (
        "",
        "largebatch: error: torchrun ended before all ranks had joined\n",
    )
