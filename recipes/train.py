"""Train a recipe on the processes that torchrun starts, or on one process without it.

    torchrun --nproc-per-node 8 -m largebatch.recipes.train RECIPE [KEY=VALUE]...

with --numa-binding=node where the ranks have GPUs and numactl is installed, and with
--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1, so that SIGUSR1 too reaches the ranks.
On several machines, run this on each; HOST is one of them:

    torchrun --nnodes N --nproc-per-node 8 --numa-binding=node --max-restarts 3 \\
        --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m largebatch.recipes.train RECIPE run_dir=/shared/DIR resume=true

``--resume`` is short for resume=true, which resumes from the newest checkpoint in run_dir.
``--quiet`` shows nothing but warnings and errors, on standard error.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import Any

from . import launcher as launcher  # which notes it before the imports that take seconds
from .errors import exit_on_missing_package, is_reported_here
from .training.process import ending_in_one_line, going_on

_process = ExitStack()
if __name__ == "__main__":  # before the imports that take seconds
    _process.enter_context(ending_in_one_line())

with exit_on_missing_package(when=__name__ == "__main__"):
    from .ranks import Job, device_of, joined
    from .schema.load import Loaded, load
    from .training.build import callbacks_of, prepare
    from .training.callbacks import CallbackList
    from .training.folder.place import run_place
    from .training.process import age_seconds, reported_once
    from .training.trainer import Trainer


def train(loaded: Loaded, *, quiet: bool = False, began_seconds: float = 0.0) -> dict[str, Any]:
    """Train in this process, which is one of torchrun's or the only one."""
    with joined(loaded.recipe) as job:
        return Trainer.of(loaded, job, quiet=quiet, began_seconds=began_seconds).run()


def check(loaded: Loaded, processes: int) -> None:
    """Check a run on ``processes`` processes of this machine, without starting it."""
    device_of(loaded.recipe, processes - 1)
    job = Job(0, processes, processes, device_of(loaded.recipe, 0))
    callbacks = CallbackList(callbacks_of(loaded.recipe), job)
    place = run_place(loaded, started="")
    callbacks.check(loaded.recipe, place.folder)
    prepare(loaded, job, place)


def main(arguments: list[str]) -> None:
    """Run the command line; an error that the user can fix gives exit code 2 and one line."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if arguments else 2)
    overrides = ["resume=true" if a == "--resume" else a for a in arguments[1:] if a != "--quiet"]
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # The processes of a machine read the same files and see the same GPUs: one of them reports.
    with reported_once(launcher.is_first_of_machine):
        loaded = load(arguments[0], overrides)
        device_of(loaded.recipe, local_world_size - 1)

    with reported_once(is_reported_here):
        train(loaded, quiet="--quiet" in arguments, began_seconds=age_seconds())


if __name__ == "__main__":
    with going_on(), _process, exit_on_missing_package():
        main(sys.argv[1:])
