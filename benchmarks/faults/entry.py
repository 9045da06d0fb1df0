"""What torchrun runs on each rank: ``largebatch.recipes.train``, by path, so that it can fork."""

import faulthandler
import os
import sys
from pathlib import Path

from benchmarks.faults.watched import BEGUN_BY_SECONDS, MARKS, SAID, STACKS
from largebatch.recipes.train import main

if __name__ == "__main__":
    marks, rank = Path(os.environ[MARKS]), f"{os.environ['GROUP_RANK']}-{os.environ['LOCAL_RANK']}"
    stacks = os.open(marks / f"{STACKS}{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.dump_traceback_later(BEGUN_BY_SECONDS, file=stacks)
    file = os.open(marks / f"{SAID}{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    main(sys.argv[1:])
