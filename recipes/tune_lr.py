"""Short module name of ``largebatch tune lr``, to start under torchrun.

torchrun [...] -m largebatch.recipes.tune_lr RECIPE [KEY=VALUE]... [OPTIONS]
"""

from __future__ import annotations

import sys

from .commands.app import main

if __name__ == "__main__":
    main(["tune", "lr", *sys.argv[1:]])
