"""Claim: in a run of 2,000 steps on two ranks, memory, file descriptors and threads stay flat.

    python -m benchmarks.faults.soak [--steps 2000]

The run trains on the digits, evaluates, writes checkpoints and logs all the time. The processes of
both ranks are looked at four times a second. From the second to the last quarter of the run, the
most memory that a rank holds may grow by 3 %, and the fewest descriptors and threads not at all: a
checkpoint has files open for a moment, and what is not closed stays. Writes
benchmarks/results/faults_soak.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from benchmarks.faults.runs import Form, Place
from benchmarks.tables import RESULTS
from largebatch.pipeline.prepare import prepare_digits
from largebatch.recipes.training.summary import processor, versions

MOST_GROWTH = 0.03
_IMAGES, _BATCH = 1437, 24


@dataclass(frozen=True)
class Look:
    """What a process held at a step.

    Attributes:
        step: The step of the run.
        megabytes: Resident memory.
        descriptors: Open files, sockets and the like.
        threads: Number of threads.
    """

    step: int
    megabytes: float
    descriptors: int
    threads: int


def look(process: int, step: int) -> Look:
    """Look at a process.

    Raises:
        OSError: It has ended.
    """
    folder = Path(f"/proc/{process}")
    lines = dict(
        line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
    )
    if "VmRSS" not in lines:
        raise ProcessLookupError(f"process {process} has ended")
    memory = float(lines["VmRSS"].split()[0]) * 1024 / 1e6
    return Look(step, memory, len(list((folder / "fd").iterdir())), int(lines["Threads"]))


def watch(place: Place, steps: int) -> dict[int, list[Look]]:
    """Train, and return what each rank held over time."""
    epochs = steps * _BATCH / _IMAGES
    run = place.start(f"epochs={epochs!r}", "checkpoint.every=50", "evaluate_every=100")
    seen: dict[int, list[Look]] = {}
    while run.agent.is_alive():
        run.agent.join(0.25)
        for rank, (process, phase, step) in run.ranks().items():
            if phase in ("step", "after") and step:
                try:
                    seen.setdefault(rank, []).append(look(process, step))
                except OSError:
                    continue  # it has just ended
    if run.agent.exitcode:
        raise RuntimeError(f"the run failed:\n{run.said[-3000:]}")
    return seen


def flat(looks: list[Look], steps: int) -> bool:
    """Whether nothing grows from a quarter of the run to its end."""
    early, late = halves(looks, steps)
    return (
        max(x.megabytes for x in late) <= (1 + MOST_GROWTH) * max(x.megabytes for x in early)
        and min(x.descriptors for x in late) <= min(x.descriptors for x in early)
        and min(x.threads for x in late) <= min(x.threads for x in early)
    )


def halves(looks: list[Look], steps: int) -> tuple[list[Look], list[Look]]:
    """What was seen from a quarter to the half of a run, and in its last quarter."""
    early = [x for x in looks if steps / 4 <= x.step < steps / 2]
    return early, [x for x in looks if x.step >= 3 * steps / 4]


def table(seen: dict[int, list[Look]], steps: int) -> str:
    """Tabulate the least and the most that each rank held, early and late."""
    lines = [
        "| rank | part of the run | looks | memory, MB | descriptors | threads | |",
        "|---:|---|---:|---:|---:|---:|---|",
    ]
    for rank, looks in sorted(seen.items()):
        verdict = "flat" if flat(looks, steps) else "grows"
        parts = ("second quarter", "last quarter")
        for name, part in zip(parts, halves(looks, steps), strict=True):
            values = (
                _span([x.megabytes for x in part], 1),
                _span([x.descriptors for x in part]),
                _span([x.threads for x in part]),
            )
            lines.append(
                f"| {rank} | {name} | {len(part)} | {' | '.join(values)} "
                f"| {verdict if name == parts[1] else ''} |"
            )
    return "\n".join(lines) + "\n"


def _span(values: Sequence[float], places: int = 0) -> str:
    return f"{min(values):.{places}f} to {max(values):.{places}f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    steps: int = parser.parse_args().steps
    if steps < 400:
        parser.error(f"--steps: {steps} are too few to be looked at; valid: at least 400")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "digits"
        prepare_digits(data)
        seen = watch(Place(Path(folder) / "soak", data, Form("FP32, LARS", 2)), steps)
    packages = ", ".join(f"{name} {number}" for name, number in versions().items())
    text = f"{table(seen, steps)}\n{steps:,} steps, {date.today()}, {processor()}, {packages}\n"
    print(text)
    if steps == 2000:
        (RESULTS / "faults_soak.md").write_text(text)
    sys.exit(not all(flat(looks, steps) for looks in seen.values()))


if __name__ == "__main__":
    main()
