"""What the smoke runs of the scripts in benchmarks/ share."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items):
    """Leave all smoke runs to `make test`: they are of scripts, not of the product."""
    for item in items:
        if item.path.is_relative_to(HERE) and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.slow("runs a script of benchmarks/"))


@pytest.fixture
def run_script(monkeypatch, tmp_path):
    """Return a function that runs the command line of a script at a small size.

    It takes the module, its options, and values that replace those of the module's names; results
    go to the test's folder. It returns the tables that were written, by name without extension.
    """

    def run(module, *options, **changed):
        if hasattr(module, "RESULTS"):
            monkeypatch.setattr(module, "RESULTS", tmp_path)
        for name, value in changed.items():
            monkeypatch.setattr(module, name, value)
        monkeypatch.setattr("sys.argv", [module.__name__, *map(str, options)])
        module.main()
        return {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.md")}

    threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def cells_of():
    """Return a function that splits the rows of all tables of a text into cells."""

    def cells(text):
        lines = [line for line in text.splitlines() if line.startswith("|")]
        heads = {i - 1 for i, line in enumerate(lines) if set(line) <= set("|-: ")}
        rows = [line for i, line in enumerate(lines) if not {i, i - 1} & heads]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]

    return cells
