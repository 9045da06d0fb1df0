"""Check and measure every GPU path, in parts, within a number of minutes.

    python -m benchmarks.gpu --minutes 9 --out DIR     on a machine with a CUDA GPU
    python -m benchmarks.gpu --dry --out DIR           on the CPU, to test the harness

Parts, in this order: correctness, which stops the run if anything is wrong; fast, the training
step against its rivals, one process each; why, what a step is made of; lars_step; hook; muon;
noise; cifar; dali. The first two are the default, because nine minutes hold no more. Results are in
DIR/gpu-<device>.json and .md as soon as they are known, and a later run adds its parts to them.
The exit code is 1 if a check or a part failed.

On a GPU that is lent for a while, in commands of at most 10 minutes, the most telling first:
    --minutes 9
    --minutes 9   --parts cifar --cifar10 cifar10.tar.xz
    --minutes 7   --parts why
    --minutes 4   --parts lars_step hook muon noise
    --minutes 7   --parts fast --only max-autotune
Give them all one --out, which must stay there from command to command: why traces what fast found
best. A machine that is taken back when it is idle loses its disk: give it the next command at once,
and where each command returns only the files of one folder, copy the results there however it
ends: trap 'cp DIR/* FOLDER' EXIT.

Needs torch 2.11 or later and the repository on the path (PYTHONPATH=src:.), without an install, and
for our trainer timm, pydantic, pyyaml, rich and tensorboard: without them a run fails at its start.
Where nothing can be downloaded, bring wheels for Python 3.12 on Linux: pydantic, pydantic-core,
annotated-types and typing-inspection, and where they are missing timm, pyyaml and rich:
    python -m benchmarks.gpu.wheels --out wheels
DALI is optional; the part dali says what it skips.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    from benchmarks.gpu.contender import end_with_parent
    from benchmarks.gpu.contenders import GROUPS
    from benchmarks.gpu.drive import CHILD, DEFAULT, PARTS

    if CHILD in os.environ:  # a part must not hold the GPU when the whole run was killed
        end_with_parent()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of all parts")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--dry", action="store_true", help="small shapes on the CPU")
    parser.add_argument(
        "--cifar10",
        type=Path,
        metavar="PATH",
        help="folder or .tar.xz with train/, and test/ or val/",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=[*PARTS],
        default=[*DEFAULT],
        metavar="PART",
        help=f"parts to run: {', '.join(PARTS)}; by default {' and '.join(DEFAULT)}",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=GROUPS,
        metavar="GROUP",
        help=f"contenders of fast to measure: {', '.join(GROUPS)}",
    )
    parser.add_argument(
        "--here", action="store_true", help="run in this process, not in one process per part"
    )
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes must be above 0, not {options.minutes:g}")
    if options.cifar10 and not options.cifar10.exists():
        parser.error(f"--cifar10: no file or folder {options.cifar10}")
    if options.dry:  # before anything imports Triton, which reads it at import
        os.environ.setdefault("TRITON_INTERPRET", "1")

    from benchmarks.gpu import drive

    parts = [part for part in PARTS if part in options.parts]
    if not options.dry:
        if not drive.has_gpu():
            parser.error("this machine has no CUDA GPU; --dry runs on the CPU")
        missing = drive.missing_packages(parts)
        if missing:
            parser.error(
                f"our trainer needs {', '.join(missing)}; on a machine with a network, "
                "python -m benchmarks.gpu.wheels gathers wheels and prints how to install them"
            )
    return drive.run(
        drive.Options(
            options.out,
            parts,
            60 * options.minutes,
            dry=options.dry,
            here=options.here or options.dry,
            cifar10=options.cifar10,
            only=tuple(options.only) if options.only else None,
        )
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the running part
    sys.exit(main())
