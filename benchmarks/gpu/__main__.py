"""Check and measure every GPU path in four calls of at most ten minutes, each decisive alone.

    python -m benchmarks.gpu --call a --copy DIR --until SECONDS     on a machine with a CUDA GPU
    python -m benchmarks.gpu --dry                                   all four, small, on the CPU

a: the checks that the rates rest on; ResNet-50 in BF16, our trainer against its rivals.
b: the same in FP16 and with FP32 masters; what a step is made of; 30 s of sustained turns.
c: all checks; the steps of LARS and Muon; the all-reduce hook on every back end; decoding.
d: steps to 94 % on CIFAR-10, by batch size (--cifar10).

Everything is in DIR/call-a.json as soon as it is known, and as text in DIR/call-a.md whenever a
part ends, so that a call that is killed keeps what it found. --until counts from the start of this
process; in a shell whose start counts, write --until $((570 - SECONDS)). What is printed last is
what matters. The exit code is 1 if a part failed, or a check failed or found something wrong.

Needs torch 2.11 or later and the repository on the path (PYTHONPATH=src:.), without an install,
and for our trainer timm, pydantic, pyyaml, rich and tensorboard; docs/results/gpu.md has the exact
command of each call, with wheels for a machine without a network. DALI is optional.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path


def age() -> float:
    """Return the seconds since this process started, before Python imported anything."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = float(fields[19]) / os.sysconf("SC_CLK_TCK")  # seconds after the boot
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    started = time.monotonic() - (age() if arguments is None else 0.0)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--call", choices="abcd", help="by default all, with --dry")
    parser.add_argument("--copy", type=Path, metavar="DIR", help="folder of the results")
    parser.add_argument("--until", type=float, default=570.0, metavar="SECONDS")
    parser.add_argument("--dry", action="store_true", help="small shapes on the CPU")
    parser.add_argument(
        "--cifar10", type=Path, metavar="FOLDER", help="with train/CLASS/ and val/CLASS/"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.dry and not (options.call and options.copy):
        parser.error("--call and --copy are needed; --dry alone tests the harness on the CPU")
    if options.until <= 0:
        parser.error(f"--until must be above 0, not {options.until:g}")
    if options.cifar10 and not options.cifar10.exists():
        parser.error(f"--cifar10: no folder {options.cifar10}")
    if options.dry:  # before anything imports Triton, which reads it at import
        os.environ.setdefault("TRITON_INTERPRET", "1")

    from benchmarks.gpu import calls
    from benchmarks.gpu.child import end_with_parent

    if options.part:  # started by another process of this command, and to end with it
        end_with_parent()
        calls.run_part(options.part, options.deadline, calls.Options.of(options))
        return 0
    if not options.dry:
        problem = calls.obstacle(options.call)
        if problem:
            parser.error(problem)
    codes = []
    with tempfile.TemporaryDirectory() as folder:
        options.copy = options.copy or Path(folder)
        for call in options.call or calls.CALLS:
            options.call = call
            codes.append(calls.run(calls.Options.of(options), started + options.until))
            started = time.monotonic()
    return max(codes)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the running part
    sys.exit(main())
