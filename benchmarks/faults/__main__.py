"""Claim: whatever happens to a run, it ends with the bits of one to which nothing happened, or with
one line that says why it does not go on. Two ends are other ones, as promised: with a loss scale, a
step whose gradient is not finite is skipped and counted, and with fewer machines sums have another
order.

    python -m benchmarks.faults [--seed 0] [--only TEXT]

Small runs on the digits are killed, suspended, started twice, and given full disks, damaged
checkpoints and numbers that are not finite, each at a random moment, in six forms on 1 to 3 ranks.
After each fault the run is started again where it ended, and compared with an uninterrupted one:
the weights, their moving average, and all metrics but times.

Writes benchmarks/results/faults.md and .json after each kind; the rows of the kinds that are run
replace those in the file. A fault that comes too late is repeated at another moment. Takes about
half an hour on two cores; full disks need root, as they are mounted.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import tables
from benchmarks.faults.kinds import (
    PHASES,
    Fault,
    MissedError,
    can_mount,
    damaged,
    disk_full,
    killed,
    lost_for_good,
    not_finite,
    restarted,
    suspended,
    terminated,
    torchrun_killed,
    twice,
)
from benchmarks.faults.runs import FORMS, Form, Place, References
from largebatch.pipeline.prepare import prepare_digits
from tests.ranks import heed_signals

RESULT = tables.RESULTS / "faults.json"

#: The kinds of faults: name, fault, and how many of it.
KINDS: list[tuple[str, Fault, int]] = [
    *((f"SIGKILL of one rank, {phase}", killed("one", phase), 5) for phase in PHASES),
    *((f"SIGKILL of all ranks, {phase}", killed("all", phase), 4) for phase in PHASES),
    *((f"SIGKILL of one rank, {p}, torchrun restarts", restarted(p), 3) for p in PHASES),
    *((f"SIGKILL of torchrun alone, {p}", torchrun_killed(p), 3) for p in PHASES[1:3]),
    ("SIGTERM to torchrun", terminated("torchrun"), 5),
    ("SIGTERM to one rank", terminated("one"), 5),
    ("SIGSTOP of one rank for a second", suspended("one"), 5),
    ("SIGSTOP of all ranks for a second", suspended("all"), 3),
    ("disk full, freed while the run goes on", disk_full(freed=True), 4),
    ("disk full to the end", disk_full(freed=False), 4),
    ("a bit of the newest checkpoint flipped", damaged("bit"), 8),
    ("a file of the newest checkpoint truncated", damaged("truncated"), 4),
    ("a file of the newest checkpoint removed", damaged("removed"), 4),
    ("a bit of the two newest checkpoints flipped", damaged("bit", 2), 3),
    ("a bit of each checkpoint flipped", damaged("bit", 0), 3),
    ("a second run on the same folder", twice, 4),
    *(
        (f"{value} into {text} of one rank", not_finite(into, value), 3)
        for into, text in (
            ("input", "an image"),
            ("gradient", "the gradient"),
            ("weight", "a weight"),
        )
        for value in ("nan", "inf")
    ),
    ("a machine lost for good", lost_for_good, 3),
]
#: The forms of the runs that lose a machine.
ELASTIC = ("FP32, LARS", "BF16, SGD, accumulation", "FP16 with FP32 masters, LARS, accumulation")


def forms(seed: int) -> list[Form]:
    """All forms on 1, 2 and 3 ranks, in a random order."""
    found = [Form(name, ranks) for name in FORMS for ranks in (1, 2, 3)]
    Random(seed).shuffle(found)
    return found


def run_all(data: Path, folder: Path, seed: int, only: str) -> list[dict[str, Any]]:
    """Bring about the faults whose kind has the text ``only``, and return all rows of the file.

    Rows of the file are replaced kind by kind.
    """
    references, following = References(folder, data), forms(seed)
    if not any(only in name for name, _, _ in KINDS):
        raise SystemExit(
            f"--only: no kind has {only!r}; valid: {'; '.join(n for n, _, _ in KINDS)}"
        )
    before = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    rows = {name: [row for row in before if row["fault"] == name] for name, _, _ in KINDS}
    for name, fault, count in KINDS:
        if only not in name:
            continue
        if "disk" in name and not can_mount():
            print(f"{name}: left out, as mounting a disk needs root", flush=True)
            continue
        rows[name] = []
        for number in range(count):
            form = following.pop(0)
            following.append(form)
            if fault is lost_for_good:
                form = Form(ELASTIC[number], 2 + number % 2)
            row = run_one(name, fault, form, references, folder, data, f"{seed} {number}")
            rows[name].append(row)
            print(" | ".join(str(value) for value in row.values()), flush=True)
        write([row for of_kind in rows.values() for row in of_kind], seed)
    return [row for of_kind in rows.values() for row in of_kind]


def run_one(
    name: str,
    fault: Fault,
    form: Form,
    references: References,
    folder: Path,
    data: Path,
    seed: str,
) -> dict[str, Any]:
    """Bring about one fault, at another moment where the run was too fast for it."""
    start = time.perf_counter()
    for attempt in range(5):
        random = Random(f"{name} {seed} {attempt}")
        place = Place(folder / f"fault-{time.monotonic_ns()}", data, form)
        try:
            outcome, expected = fault(place, references, random), True
        except MissedError:
            continue
        except Exception as error:  # whatever it is, the other faults go on
            outcome, expected = f"{type(error).__name__}: {error}\n{place.stacks}".strip(), False
        finally:
            place.clear()
        break
    else:
        outcome, expected = "the run ended before each of five moments", False
    return {
        "fault": name,
        "form": form.name,
        "ranks": form.ranks,
        "outcome": outcome,
        "as_promised": expected,
        "date": date.today().isoformat(),
        "seconds": round(time.perf_counter() - start, 1),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Tabulate the faults by kind, with their outcomes."""
    cells = []
    for name in dict.fromkeys(row["fault"] for row in rows):
        here = [row for row in rows if row["fault"] == name]
        outcomes = Counter(row["outcome"].partition("\n")[0] for row in here)
        several = len(outcomes) > 1
        text = "; ".join(f"{text} ({n})" if several else text for text, n in outcomes.items())
        cells.append((name, len(here), text))
    kept = sum(row["as_promised"] for row in rows)
    ranks = Counter(row["ranks"] for row in rows)
    spread = ", ".join(f"{ranks[n]} on {n}" for n in sorted(ranks))
    names = Counter(row["form"] for row in rows)
    forms = "; ".join(f"{name} {count}" for name, count in sorted(names.items()))
    made = tables.table({"fault": "l", "times": "r", "outcome": "l"}, cells)
    of_all = f"{kept} of {len(rows)} faults ended as promised: {spread} ranks."
    return f"{made}\n\n{of_all} By form: {forms}.\n"


def write(rows: list[dict[str, Any]], seed: int) -> str:
    """Write the rows and their table, and return the table."""
    first, last = (end(row["date"] for row in rows) for end in (min, max))
    origin = tables.about(f"seed {seed}", day=first if first == last else f"{first} to {last}")
    text = f"{table(rows)}\n{origin}\n"
    content = {"claim": tables.claim_of(__doc__), "origin": origin, "rows": rows}
    tables.store(RESULT, content)
    RESULT.with_suffix(".md").write_text(text)
    return text


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the moments; default: 0")
    parser.add_argument("--only", default="", metavar="TEXT", help="kinds whose name has this")
    options = parser.parse_args()
    heed_signals()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "digits"
        prepare_digits(data)
        rows = run_all(data, Path(folder), options.seed, options.only)
    print(write(rows, options.seed))
    sys.exit(not all(row["as_promised"] for row in rows))


if __name__ == "__main__":
    main()
