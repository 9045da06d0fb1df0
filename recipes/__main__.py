"""The command line under torchrun, one process per GPU, with the words of ``largebatch``.

torchrun [...] -m largebatch.recipes evaluate RUN
"""

from __future__ import annotations

from .commands.app import main

if __name__ == "__main__":
    main()
