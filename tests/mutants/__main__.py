"""The yardstick of the test suite: 200 faults put into the code, and which of them the tests see.

    python -m tests.mutants cover    # once: which tests execute which line; takes a run of all
    python -m tests.mutants run      # each mutant with the tests that cover it, 60 s at most
    python -m tests.mutants table    # the baseline, and what became of it

``list.json`` holds the mutants, half of them in the trainer and half in the packages below it, on
lines that are meant to stay. ``baseline.json`` holds what became of each at the commit before the
suite was first shortened. **A mutant that was caught there, and is not any more, is named**: a
deletion took away a check, which is to be put back. A mutant whose line is gone is named too.
Arguments after ``cover`` are pytest's, such as ``-n 3``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path

from .sites import Mutant, mutants

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
BUILD = ROOT / "build" / "mutants"
LIST, BASELINE, LATEST = HERE / "list.json", HERE / "baseline.json", BUILD / "outcomes.json"
SEED = 0
OUTCOMES = ("caught", "missed", "out of time", "not covered", "gone")

# Parts of the code, what is chosen in each, and of which files: those that the design keeps.
PARTS = {
    "step": (15, "recipes/training/step.py"),
    "timeline": (14, "recipes/training/timeline.py"),
    "build": (14, "recipes/training/build.py"),
    "evaluate": (14, "recipes/training/evaluate.py"),
    "checkpoint": (14, "recipes/training/folder/checkpoint.py"),
    "schema": (15, "recipes/schema/{load,optimizers,recipe,sections,types}.py"),
    "models": (14, "recipes/models/*.py"),
    "lars": (
        25,
        "lars/{optimizer,reference,coefficients,foreach,fused,groups,schedules,sharding}.py"
        " lars/history.py lars/triton/{step,tables}.py"
        " lars/muon/{adamw,newton_schulz,optimizer,reference,step}.py",
    ),
    "amp": (25, "amp/{forms,precision,convert,masters,loss_scale,underflow}.py"),
    "comm": (
        25,
        "comm/{hook,execute,plan,collectives,topology,fusion,traffic}.py"
        " comm/algorithms/{base,halving_doubling,leader,parameter_server,ring,torus}.py"
        " comm/model/{cost,nccl,profile,simulate}.py comm/tuning/{tune,fit}.py comm/failure/*.py",
    ),
    "pipeline": (
        25,
        "pipeline/*.py pipeline/sources/*.py pipeline/sources/{shards,storage}/*.py"
        " pipeline/decode/{reader,crops,header,batch,verify,backends,dali,nvimgcodec}.py"
        " pipeline/decode/{torchvision,synthetic}.py pipeline/audit/*.py pipeline/prepare/*.py",
    ),
}


def choose() -> list[Mutant]:
    """Choose the mutants: at random in each part, at most one to a line."""
    chosen = []
    for part, (number, patterns) in PARTS.items():
        paths = sorted({path for pattern in patterns.split() for path in _files(pattern)})
        every = [mutant for path in paths for mutant in mutants(ROOT, path)]
        generator = random.Random(f"{SEED} {part}")
        lines: dict[object, Mutant] = {}
        for mutant in generator.sample(every, len(every)):
            lines.setdefault((mutant.path, mutant.function, mutant.line), mutant)
        chosen += list(lines.values())[:number]
    return chosen


def _files(pattern: str) -> list[str]:
    """Paths of a glob pattern that may have one list of names in braces."""
    before, _, rest = pattern.partition("{")
    names, _, after = rest.partition("}")
    patterns = [before + name + after for name in names.split(",")]
    return [str(path.relative_to(ROOT)) for one in patterns for path in ROOT.glob(one)]


def part_of(mutant: Mutant) -> str:
    """The part that a mutant was chosen from."""
    name = mutant.path.removeprefix("recipes/").removeprefix("training/")
    part = name.split("/")[0].removesuffix(".py")
    return "build" if part == "data" else part  # the data of a run were made in build.py


def table(rows: list[dict[str, str]]) -> str:
    """Outcomes by part, as a table in Markdown."""
    counts: dict[str, Counter[str]] = {part: Counter() for part in (*PARTS, "all")}
    for row in rows:
        counts[row["part"]][row["outcome"]] += 1
        counts["all"][row["outcome"]] += 1
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
    parser.add_argument("what", choices=("choose", "cover", "run", "table"))
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--baseline", action="store_true", help="keep the outcomes as baseline")
    options, further = parser.parse_known_args()
    if options.what == "choose":
        lines = [json.dumps(mutant.record()) for mutant in choose()]
        LIST.write_text("[\n" + ",\n".join(lines) + "\n]\n")
        return
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
