"""Train a recipe, on the processes that torchrun starts or alone without it.

    torchrun --nproc-per-node 8 -m largebatch.recipes.train RECIPE [KEY=VALUE]...

On several machines, start this on each; HOST is one of them:

    torchrun --nnodes N --nproc-per-node 8 --max-restarts 3 \\
        --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m largebatch.recipes.train RECIPE run_dir=/shared/DIR resume=true

``--resume`` is short for resume=true, which goes on from the newest checkpoint of run_dir.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from .errors import AgreedError, exit_on_user_error
from .ranks import Job, device_of, joined
from .schema.load import Loaded, load
from .training.build import prepare
from .training.trainer import Trainer


def train(loaded: Loaded) -> dict[str, Any]:
    """Train in this process, one of those that torchrun started or the only one.

    Returns:
        The summary of the run; empty on ranks that do not lead.

    Raises:
        RecipeError, DataError, PlanError, TopologyError: what the user got wrong.
    """
    with joined(loaded.recipe) as job:
        return Trainer(loaded, job).run()


def check(loaded: Loaded, processes: int) -> None:
    """Find what is wrong with a run on ``processes`` of this machine, without starting it.

    Raises:
        RecipeError, DataError, PlanError, TopologyError: what the user got wrong.
    """
    device_of(loaded.recipe, processes - 1)
    prepare(loaded, Job(0, processes, processes, device_of(loaded.recipe, 0)), started="")


def main(arguments: list[str]) -> None:
    """The command line; exits with code 2 and one line where the user got something wrong."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if arguments else 2)
    overrides = ["resume=true" if a == "--resume" else a for a in arguments[1:]]
    leads = os.environ.get("RANK", "0") == "0"
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    with exit_on_user_error(lambda error: speaks):  # the ranks of a machine read the same files
        loaded = load(arguments[0], overrides)
    with exit_on_user_error(lambda error: leads or not isinstance(error, AgreedError)):
        train(loaded)


if __name__ == "__main__":
    main(sys.argv[1:])
