"""Start processes on this machine."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile

import typer

#: Loggers with which torchrun reports the end of a process, beside what the process has printed.
_REPORTS_OF_TORCHRUN = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.multiprocessing.errors.error_handler",
)


def torchrun(nproc: int, module: str, arguments: list[str]) -> None:
    """Run a module on ``nproc`` processes with torchrun; the first that fails gives the exit code.

    torchrun's own report of a failure is left out: the process that failed has printed an error,
    unless a signal ended it. LOGLEVEL brings torchrun's log back.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    if "LOGLEVEL" not in os.environ:
        for name in _REPORTS_OF_TORCHRUN:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # Without this, torchrun sets one thread per process and prints a warning.
    share = max(1, len(os.sched_getaffinity(0)) // nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(share))
    # Time for a checkpoint after a signal, in versions of torchrun that read this.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    # It passes these on to the ranks, and would leave them alone if another one ended it. One that
    # is ignored, as SIGHUP under nohup, stays ignored.
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
    handled = [n for n in names if signal.getsignal(signal.Signals[n]) is not signal.SIG_IGN]
    processes = ["--standalone", "--nproc-per-node", str(nproc)]
    processes.append(f"--signals-to-handle={','.join(handled)}")
    # Where ranks leave errors for it, in a folder that it would leave behind.
    logs = tempfile.TemporaryDirectory(prefix="largebatch-torchrun-", ignore_cleanup_errors=True)
    try:
        with logs as folder:
            run([*processes, f"--log-dir={folder}", "-m", module, *arguments])
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:  # the process has printed why
            raise SystemExit(failure.exitcode) from None
        print(
            f"largebatch: error: rank {rank} was ended by {failure.signal_name()}", file=sys.stderr
        )
        raise SystemExit(128 - failure.exitcode) from None


def torchrun_again(context: typer.Context, nproc: int) -> None:
    """Run a command again under torchrun, with its arguments and options but for ``--nproc``."""
    words = context.command_path.split()[1:]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name == "nproc" or value is None or value is False:
            continue
        option = [parameter.opts[-1]] if parameter.param_type_name == "option" else []
        for each in value if isinstance(value, list | tuple) else [value]:
            words += option if each is True else [*option, str(each)]
    torchrun(nproc, "largebatch.recipes", words)
