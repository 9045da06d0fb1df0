"""Check and measure every GPU path, in parts, within a number of minutes.

    python -m benchmarks.gpu --minutes 9 --out DIR     on a machine with a CUDA GPU
    python -m benchmarks.gpu --dry --out DIR           on the CPU, to test the harness

Needs torch 2.11 or later, and the repository on the path (PYTHONPATH=src:.) without an install.
Parts that need other packages are skipped with the reason where those are missing: timm, pydantic,
pyyaml and rich for the trainer, triton, torchvision, DALI. Results are written to
DIR/gpu-<device>.json and .md as soon as they are known. The exit code is 1 if a check or a part
failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    from benchmarks.gpu.drive import PARTS

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of all parts")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--dry", action="store_true", help="small shapes on the CPU")
    parser.add_argument(
        "--cifar10", type=Path, metavar="DIR", help="folder with train/, and test/ or val/"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=[*PARTS],
        default=[*PARTS],
        metavar="PART",
        help="parts to run",
    )
    parser.add_argument(
        "--here", action="store_true", help="run in this process, not in one process per part"
    )
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes must be above 0, not {options.minutes:g}")
    if options.cifar10 and not (options.cifar10 / "train").is_dir():
        parser.error(f"--cifar10: no folder {options.cifar10 / 'train'}")
    if options.dry:  # before anything imports Triton, which reads it at import
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the running part
    sys.exit(main())
