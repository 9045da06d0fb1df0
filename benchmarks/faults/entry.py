"""What torchrun runs on each rank: ``largebatch.recipes.train``, by path, so that it can fork."""

import os
import sys
from pathlib import Path

from benchmarks.faults.watched import MARKS, SAID
from largebatch.recipes.train import main

if __name__ == "__main__":
    out = Path(os.environ[MARKS]) / f"{SAID}{os.environ['GROUP_RANK']}-{os.environ['LOCAL_RANK']}"
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    main(sys.argv[1:])
