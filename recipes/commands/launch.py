"""Start processes on this machine."""

from __future__ import annotations

import os


def torchrun(nproc: int, module: str, arguments: list[str]) -> None:
    """Run a module on ``nproc`` processes; ends with their exit code, or that of a signal."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    # torchrun would set one thread per process, and say so.
    share = max(1, len(os.sched_getaffinity(0)) // nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(share))
    # How long a checkpoint may take after a signal, where torchrun can be told.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    processes = ["--standalone", "--nproc-per-node", str(nproc)]
    try:
        run([*processes, "-m", module, *arguments])
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    except ChildFailedError as error:  # its process has said why
        code = error.get_first_failure()[1].exitcode
        raise SystemExit(code if code > 0 else 128 - code) from None
