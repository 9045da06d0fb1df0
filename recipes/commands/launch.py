"""Start the processes of a run on this machine."""

from __future__ import annotations

import os


def torchrun(nproc: int, module: str, arguments: list[str]) -> None:
    """Run a module in ``nproc`` processes with torchrun.

    Args:
        nproc: Number of processes.
        module: Full name of the module.
        arguments: Arguments of the module.

    Raises:
        SystemExit: A process failed; with its exit code, or 128 plus the number of the signal that
            ended it.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    # Otherwise torchrun sets one thread per process, and warns about it.
    share = max(1, len(os.sched_getaffinity(0)) // nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(share))
    # Time for a checkpoint after a signal, in the versions of torchrun that can be told.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    processes = ["--standalone", "--nproc-per-node", str(nproc)]
    try:
        run([*processes, "-m", module, *arguments])
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    except ChildFailedError as error:  # the process has reported why
        code = error.get_first_failure()[1].exitcode
        raise SystemExit(code if code > 0 else 128 - code) from None
