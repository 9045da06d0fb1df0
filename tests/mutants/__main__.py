"""The yardstick of the test suite: 200 faults put into the code, and which of them the tests see.

    python -m tests.mutants cover    # once: which tests execute which line; takes a run of all
    python -m tests.mutants run      # each mutant with the tests that cover it, 60 s at most
    python -m tests.mutants lost     # how many became what, and which were caught before

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
    parser.add_argument("what", choices=("cover", "run", "lost"))
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    options, further = parser.parse_known_args()
    if options.what == "cover":
        from .cover import cover

        cover(ROOT, BUILD, further)
        return
    if options.what == "run":
        from .run import run

        mutants = [Mutant(**record) for record in json.loads(LIST.read_text())]
        outcomes = zip(mutants, run(ROOT, mutants, BUILD, options.jobs), strict=True)
        rows = [{"mutant": str(mutant), **vars(outcome)} for mutant, outcome in outcomes]
        LATEST.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    before, after = (json.loads(file.read_text()) for file in (BASELINE, LATEST))
    for name, rows in (("The baseline", before), ("Now", after)):
        print(f"{name}: {dict(Counter(row['outcome'] for row in rows))}")
    print("Caught before and not now:", *(lost(before, after) or ["none"]), sep="\n")
    sys.exit(bool(lost(before, after)))


if __name__ == "__main__":
    main()
