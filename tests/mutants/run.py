"""Run the tests that cover each mutant on a copy of the tree that holds it.

A mutant is

- ``caught`` if one of these tests fails, or does not end (``hangs``);
- ``missed`` if they pass;
- ``out of time`` if they take more than ``LIMIT_SECONDS`` and none has failed;
- ``not covered`` if no test executes its line;
- ``gone`` if its line is no longer in the tree.
"""

from __future__ import annotations

import compileall
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue

import psutil

from .cover import Covering
from .sites import ROOMS, Mutant, mutate, place

LIMIT_SECONDS = 60
# Of tests, by their recorded durations: the rest of the limit is for the start of pytest and noise.
TESTS_SECONDS = 30
# A test that takes ten times as long as recorded, and this much more, does not end.
HANGS_SECONDS = 30


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant; ``by`` is the test that caught it, ``tests`` how many were run."""

    outcome: str
    by: str = ""
    tests: int = 0
    seconds: float = 0.0


def run(root: Path, mutants: Sequence[Mutant], work: Path, jobs: int) -> list[Outcome]:
    """Run all mutants, ``jobs`` at a time, print each outcome, and return them in order.

    A test that fails without any mutant as well catches nothing: the mutants that it seemed to
    catch are run again without it.
    """
    covering, done = Covering(root, work), count(1)
    trees: SimpleQueue[Path] = SimpleQueue()
    for job in range(jobs):
        trees.put(_copy(root, work / f"tree-{job}"))
    fails_anyway: set[str] = set()

    def one(index: int) -> Outcome:
        tree = trees.get()
        try:
            outcome = _run_one(root, tree, mutants[index], covering, fails_anyway)
        finally:
            trees.put(tree)
        seconds = f"{outcome.seconds:5.1f} s"
        print(f"{next(done):4} {outcome.outcome:12} {seconds}  {mutants[index]}", flush=True)
        return outcome

    outcomes: dict[int, Outcome] = {}
    todo = list(range(len(mutants)))
    while todo:
        with ThreadPoolExecutor(jobs) as pool:
            outcomes.update(zip(todo, pool.map(one, todo), strict=True))
        catching = sorted({outcomes[i].by for i in todo} - {"", "collection"})
        broken = _failing(work / "tree-0", catching)
        fails_anyway |= broken
        todo = [i for i in todo if outcomes[i].by in broken]
    return [outcomes[i] for i in range(len(mutants))]


def _copy(root: Path, tree: Path) -> Path:
    """Copy the files of the project that git knows or does not ignore."""
    shutil.rmtree(tree, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (root / name).is_symlink() or (root / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, tree / name, follow_symlinks=False)
    # Compiled files are valid for a text, not for a time and a size: mutants may differ in neither.
    checked = py_compile.PycInvalidationMode.CHECKED_HASH
    for room in ROOMS:
        compileall.compile_dir(tree / room, quiet=1, invalidation_mode=checked)
    return tree


def _run_one(
    root: Path, tree: Path, mutant: Mutant, covering: Covering, fails_anyway: set[str]
) -> Outcome:
    """Write the mutant into a tree, run the tests that cover it, and restore the file."""
    found = place(root, mutant)
    if not found:
        return Outcome("gone")
    path, line = found
    tests = [test for test in covering.tests(path, line) if test not in fails_anyway]
    if not tests:
        return Outcome("not covered")
    chosen, seconds = tests[:1], covering.seconds[tests[0]]
    for test in tests[1:]:
        seconds += covering.seconds[test]
        if seconds > TESTS_SECONDS:
            break
        chosen.append(test)
    target = tree / path.relative_to(root)
    text = target.read_text()
    start = time.monotonic()
    try:
        target.write_text(mutate(target, line, mutant))
        outcome, by = _pytest(tree, chosen, LIMIT_SECONDS)
        if outcome == "out of time" and by:
            limit = 10 * covering.seconds[by] + HANGS_SECONDS
            again, _ = _pytest(tree, [by], limit)
            outcome, by = ("caught", by) if again != "missed" else ("out of time", "")
    finally:
        target.write_text(text)
    return Outcome(outcome, by, len(chosen), round(time.monotonic() - start, 1))


def _failing(tree: Path, tests: Sequence[str]) -> set[str]:
    """Which tests fail in a tree without mutants; all are tried at once first."""
    if not tests or _pytest(tree, tests, LIMIT_SECONDS * len(tests))[0] == "missed":
        return set()
    return {test for test in tests if _pytest(tree, [test], LIMIT_SECONDS)[0] != "missed"}


def _pytest(tree: Path, tests: Sequence[str], limit: float) -> tuple[str, str]:
    """Run tests in a tree; return the outcome, and the test that failed or did not end."""
    with tempfile.NamedTemporaryFile("w+") as names, tempfile.TemporaryFile("w+") as out:
        names.write("\n".join(tests))
        names.flush()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((str(tree / "src"), str(tree))),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "pytest", "-x", "-v", "--tb=no", "--no-header"]
        command += ["-p", "no:cacheprovider", "--hypothesis-seed=0", f"@{names.name}"]
        files = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        process = psutil.Popen(command, cwd=tree, env=environment, **files)
        try:
            code = process.wait(limit)
        except psutil.TimeoutExpired:
            code = None
            for child in [*process.children(recursive=True), process]:
                child.kill()
            process.wait()
        out.seek(0)
        text = out.read()
    if code == 0:
        return "missed", ""
    if code is None:
        running = re.search(r"^(tests/\S.*?) ?$", text.rstrip("\n").rpartition("\n")[2])
        return "out of time", running[1] if running and running[1] in tests else ""
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", text, re.MULTILINE)
    broken = failed or "found no collectors" in text or "loading conftest" in text
    if not broken and "no match in any of" in text:  # a test is gone, and pytest has run none
        return "missed", ""
    return "caught", failed[1] if failed and failed[1] in tests else "collection"
