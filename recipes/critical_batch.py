"""The processes of ``largebatch critical-batch``, one per GPU; takes the same options.

torchrun [...] -m largebatch.recipes.critical_batch RECIPE [KEY=VALUE]... [OPTIONS]
"""

from __future__ import annotations

import sys

from .commands.app import main

if __name__ == "__main__":
    main(["critical-batch", *sys.argv[1:]])
