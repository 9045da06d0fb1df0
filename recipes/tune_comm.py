"""Short module name of ``largebatch comm tune``, to start under torchrun.

torchrun [...] -m largebatch.recipes.tune_comm [OPTIONS]
"""

from __future__ import annotations

import sys

from .commands.app import main

if __name__ == "__main__":
    main(["comm", "tune", *sys.argv[1:]])
