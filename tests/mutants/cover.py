"""Run the test suite once, and keep which tests execute which line, in which time.

Processes that a test starts count for it (see ``measured/sitecustomize.py``); lines of a process
that is killed are not seen.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import coverage

from .sites import ROOMS

HERE = Path(__file__).parent


def cover(root: Path, out: Path, arguments: Sequence[str]) -> None:
    """Run pytest with ``arguments`` under coverage; write ``out/coverage`` and the durations."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    settings = out / "coveragerc"
    settings.write_text(
        "[run]\n"
        f"data_file = {out}/coverage\n"
        "parallel = true\n"
        "concurrency = multiprocessing, thread\n"
        "context = ${PYTEST_CURRENT_TEST-}\n"
        f"include = {', '.join(f'{root}/{room}/*' for room in ROOMS)}\n"
    )
    environment = {
        **os.environ,
        "COVERAGE_PROCESS_START": str(settings),
        "LARGEBATCH_DURATIONS": str(out / "durations.json"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (HERE / "measured", root / "src", root))),
    }
    command = [sys.executable, "-m", "pytest", "-p", "tests.mutants.contexts", *arguments]
    subprocess.run(command, cwd=root, env=environment, check=False)
    measured = coverage.Coverage(config_file=str(settings))
    measured.combine()  # warns of the file of a process that was killed as it wrote
    measured.save()


def in_function(path: Path, line: int) -> bool:
    """Whether a line is in the body of a function."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    bodies = (
        statement
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, functions)
        for statement in (node.body if isinstance(node.body, list) else [node.body])
    )
    return any(body.lineno <= line <= (body.end_lineno or 0) for body in bodies)


class Covering:
    """Which tests cover a line, by what :func:`cover` wrote, and their durations in seconds."""

    def __init__(self, root: Path, out: Path) -> None:
        self._root = root
        self._data = coverage.CoverageData(str(out / "coverage"))
        self._data.read()
        self.seconds: dict[str, float] = json.loads((out / "durations.json").read_text())

    def tests(self, path: Path, line: int) -> list[str]:
        """The tests to run for a line, those of its own folder first, and quick ones first.

        A line outside functions is executed on import, not by each test that needs it: it has the
        tests of its own folder too.
        """
        contexts = self._data.contexts_by_lineno(str(path)).get(line, [])
        # "test (call)" in processes that a test started, "|test" in its own.
        names = {name.strip("|").rpartition(" (")[0] or name.strip("|") for name in contexts}
        own = f"tests/{path.relative_to(self._root).parent}/"
        found = names & self.seconds.keys()
        if contexts and not in_function(path, line):
            found |= {name for name in self.seconds if name.startswith(own)}
        own_file = f"{own}test_{path.stem}.py"

        def place(name: str) -> tuple[bool, bool, float, str]:
            is_near = name.startswith(own_file), name.startswith(own)
            return not is_near[0], not is_near[1], self.seconds[name], name

        return sorted(found, key=place)
