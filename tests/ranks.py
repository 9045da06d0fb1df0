"""Run functions on several ranks, and modules as programs, in processes that start quickly."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from largebatch.recipes.training.process import STOPPING

_PR_SET_PDEATHSIG = 1  # see prctl(2)

#: Options of torchrun, before the path of a script, for ranks that start quickly.
FORKED = ("--start-method", "forkserver", "--run-path")


def heed_signals() -> None:
    """Give signals that are ignored their default handlers, for this process and those it starts.

    Shells start background jobs with Ctrl-C ignored, nohup with SIGHUP; runs leave that as it is.
    """
    for number in STOPPING:
        if signal.getsignal(number) is signal.SIG_IGN:
            default = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if default else signal.SIG_DFL)


# Processes are forked from a server that has only imported the modules that take long to import.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "largebatch.recipes.training.trainer",
        "hypothesis",
        "matplotlib.backends.backend_agg",
        "matplotlib.figure",
        "nvidia.dali",
        "pytest",
        "timm",
        "torch.distributed.run",
        "torch.utils.tensorboard",
    ]
)


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what ``function(*args)`` returns on each rank of a gloo process group, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            CONTEXT.Process(target=_rank, args=(rank, world_size, folder, function, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(180)
        for process in processes:
            if process.is_alive():
                process.kill()
        errors = [path.read_text() for path in sorted(Path(folder).glob("error-*"))]
        assert not errors, "\n".join(errors)
        codes = [process.exitcode for process in processes]
        assert codes == [0] * world_size, f"exit codes {codes}"
        return [
            torch.load(Path(folder) / f"result-{rank}", weights_only=False)
            for rank in range(world_size)
        ]


def _rank(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: Any) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        dist.barrier()  # else a fast rank could exit while others still connect
        torch.save(function(*args), Path(folder) / f"result-{rank}")
        dist.destroy_process_group()
    except BaseException:
        (Path(folder) / f"error-{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise


def free_ports(number: int, first: int = 10_000, end: int = 32_000) -> list[int]:
    """Return ports that are free now, outside those that the system gives to other sockets.

    Processes of tests look from different places on, so that they do not find the same.
    """
    free: list[int] = []
    start = os.getpid() * 37 % (end - first)
    for offset in range(end - first):
        port = first + (start + offset) % (end - first)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            free.append(port)
        if len(free) == number:
            return free
    raise AssertionError(f"fewer than {number} of the ports from {first} to {end} are free")


def start_module(
    module: str,
    arguments: Sequence[str],
    out: Path,
    *,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
) -> multiprocessing.process.BaseProcess:
    """Start ``python -m module arguments`` in a process that has done the slow imports already.

    Or ``python script arguments``, where the module is the path of a script.
    """
    process = CONTEXT.Process(
        target=_module, args=(module, list(arguments), out, cwd, dict(environment or {}))
    )
    process.start()
    return process


def torchrun(
    script: Path,
    arguments: Sequence[str],
    out: Path,
    *,
    ranks: int,
    restarts: int = 0,
    environment: Mapping[str, str] | None = None,
) -> multiprocessing.process.BaseProcess:
    """Start ``torchrun script arguments`` in the script's folder; see :func:`start_module`.

    The ranks are children of the agent's only child, which has done the slow imports too.
    """
    options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    options += [*FORKED, str(script)]
    return start_module(
        "torch.distributed.run",
        [*options, *arguments],
        out,
        cwd=script.parent,
        environment={
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        },
    )


def _module(
    module: str, arguments: list[str], out: Path, cwd: Path, environment: dict[str, str]
) -> None:
    os.chdir(cwd)
    os.environ.update(environment)
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = [module, *arguments]
    torch.set_num_threads(1)
    is_script = module.endswith(".py")
    if is_script or module == "torch.distributed.run":
        _serve_forks()
    if is_script:  # whose processes are spawned, which here are forked, too
        multiprocessing.get_context = lambda method=None: CONTEXT
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _serve_forks() -> None:
    """Make the fork server of this process a copy of it as it is now: imported, and on one thread.

    torchrun has threads by the time it starts ranks. One in a hundred that were forked from it
    waited forever for a lock of the C library's resolver, which a thread of the agent's TCPStore
    had held.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0largebatch-tests-{os.getpid()}")
    listener.listen()
    alive, held = os.pipe()  # the server ends once no process holds this
    process = os.fork()
    if process == 0:
        try:
            # If torchrun is killed, its ranks are told by torch that their parent has ended.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            os.close(held)
            forkserver.main(listener.fileno(), alive, [])
        finally:
            os._exit(1)
    ours: Any = forkserver._forkserver
    ours._forkserver_address, ours._forkserver_alive_fd = listener.getsockname(), held
    ours._forkserver_pid = process
    listener.close()
    os.close(alive)
