"""The yardstick of the test suite: 200 faults put into the code, and which of them the tests see.

    python -m tests.mutants cover    # once: which tests execute which line; takes a run of all
    python -m tests.mutants run      # each mutant with the tests that cover it, 60 s at most
    python -m tests.mutants table    # the baseline, and what became of it

``list.json`` holds the mutants, half of them in the trainer and half in the packages below it. They
were drawn at random from the operators, numbers, conditions and calls of lines that are meant to
stay, by this folder's code at commit ef4665c. ``baseline.json`` holds what became of each at the
commit before the suite was first shortened. **A mutant that was caught there, and is not any more,
is named**: a deletion took away a check, which is to be put back. So is one whose line is gone.
Arguments after ``cover`` are pytest's, such as ``-n 3``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from .sites import Mutant

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
BUILD = ROOT / "build" / "mutants"
LIST, BASELINE, LATEST = HERE / "list.json", HERE / "baseline.json", BUILD / "outcomes.json"
OUTCOMES = ("caught", "missed", "out of time", "not covered", "gone")


def part_of(mutant: Mutant) -> str:
    """The part that a mutant was chosen from."""
    name = mutant.path.removeprefix("recipes/").removeprefix("training/")
    part = name.split("/")[0].removesuffix(".py")
    return "build" if part == "data" else part  # the data of a run were made in build.py


def table(rows: list[dict[str, str]]) -> str:
    """Outcomes by part, as a table in Markdown."""
    counts: dict[str, Counter[str]] = {}
    for part, row in (*((row["part"], row) for row in rows), *(("all", row) for row in rows)):
        counts.setdefault(part, Counter())[row["outcome"]] += 1
    lines = [f"| part | mutants | {' | '.join(OUTCOMES)} |", "|---" + "|---:" * 6 + "|"]
    for part, count in counts.items():
        numbers = [count.total(), *(count[name] for name in OUTCOMES)]
        lines.append(f"| {part} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def lost(before: list[dict[str, str]], after: list[dict[str, str]]) -> list[str]:
    """Name each mutant that was caught before and is not caught after.

    Both are in the order of ``list.json``, as a mutant changes its name when its line moves.
    """
    return [
        f"{now['outcome']}: {row['mutant']} (was caught by {row['by']})"
        for row, now in zip(before, after, strict=True)
        if row["outcome"] == "caught" and now["outcome"] != "caught"
    ]


def main() -> None:
    """Run a subcommand; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=("cover", "run", "table"))
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--baseline", action="store_true", help="keep the outcomes as baseline")
    options, further = parser.parse_known_args()
    if options.what == "cover":
        from .cover import cover

        cover(ROOT, BUILD, further)
        return
    if options.what == "run":
        rows = _run(options.jobs)
        file = BASELINE if options.baseline else LATEST
        file.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    before = json.loads(BASELINE.read_text())
    print(f"The baseline:\n\n{table(before)}")
    if LATEST.exists() and not options.baseline:
        after = json.loads(LATEST.read_text())
        print(f"\nNow:\n\n{table(after)}\n\nCaught before and not now:")
        print("\n".join(lost(before, after)) or "none")
        sys.exit(bool(lost(before, after)))


def _run(jobs: int) -> list[dict[str, object]]:
    from .cover import Covering
    from .run import Outcome, run

    chosen = [Mutant(**record) for record in json.loads(LIST.read_text())]
    done = 0

    def ended(index: int, outcome: Outcome) -> None:
        nonlocal done
        done += 1
        print(
            f"{done:4} {outcome.outcome:12} {outcome.seconds:5.1f} s  {chosen[index]}", flush=True
        )

    outcomes = run(ROOT, chosen, Covering(ROOT, BUILD), BUILD, jobs, ended)
    return [
        {"part": part_of(mutant), "mutant": str(mutant), **vars(outcome)}
        for mutant, outcome in zip(chosen, outcomes, strict=True)
    ]


if __name__ == "__main__":
    main()
