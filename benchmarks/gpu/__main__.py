"""Check and measure every GPU path, in parts, within a number of minutes.

    python -m benchmarks.gpu --minutes 9 --out DIR     on a machine with a CUDA GPU
    python -m benchmarks.gpu --dry --out DIR           on the CPU: shows that the harness runs

Needs torch 2.11 or later, and the repository on the path (PYTHONPATH=src:.), no install. What else
is not there is skipped, with the reason: timm, pydantic, pyyaml and rich for what the trainer does,
triton, torchvision, DALI. Results are DIR/gpu-<device>.json and .md; each part's are there as soon
as they are known. The exit code is 1 if a check or a part failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    from benchmarks.gpu.drive import PARTS

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="that all parts take, at most")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--dry", action="store_true", help="on the CPU, small and few")
    parser.add_argument(
        "--cifar10", type=Path, metavar="DIR", help="folder with train/ and test/ or val/"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=[*PARTS], default=[*PARTS], metavar="PART", help="only these"
    )
    parser.add_argument(
        "--here", action="store_true", help="in this process, not in one for each part"
    )
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes must be above 0, not {options.minutes:g}")
    if options.cifar10 and not (options.cifar10 / "train").is_dir():
        parser.error(f"--cifar10: no folder {options.cifar10 / 'train'}")
    if options.dry:  # before anything imports Triton, which reads it then
        os.environ.setdefault("TRITON_INTERPRET", "1")

    from benchmarks.gpu import drive

    if not options.dry and not drive.has_gpu():
        parser.error("this machine has no CUDA GPU; --dry runs on the CPU")
    return drive.run(
        options.out,
        options.parts,
        60 * options.minutes,
        dry=options.dry,
        here=options.here or options.dry,
        cifar10=options.cifar10,
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the part that runs, too
    sys.exit(main())
