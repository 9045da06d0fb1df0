"""Write the slowest tests of the last `make test` into CONTRIBUTING.md, as a table.

    make test && python -m tests.slowest

The times are those of calls and fixtures under three tests at a time on this machine.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- slowest tests: begin -->\n", "<!-- slowest tests: end -->\n"


def durations(file: Path) -> dict[str, float]:
    """Return the seconds of each test in a JUnit file, those of all parameters together."""
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(file).iter("testcase"):
        path = case.attrib["classname"].replace(".", "/") + ".py"
        name = case.attrib["name"].partition("[")[0]
        seconds[f"{path}::{name}"] += float(case.attrib["time"])
    return seconds


def table(seconds: dict[str, float], most: int) -> str:
    """Return the slowest in Markdown, with the share of all tests' time that they have."""
    rows = sorted(seconds.items(), key=lambda item: -item[1])[:most]
    total, part = sum(seconds.values()), sum(took for _, took in rows)
    lines = [
        f"The {len(rows)} slowest of {len(seconds):,} tests take {part:,.0f} of {total:,.0f} s "
        "(a test with parameters is one of them):",
        "",
        "| seconds | test |",
        "|---:|---|",
        *(f"| {took:.1f} | `{test}` |" for test, took in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replace the table between the marks in the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--junit", type=Path, default=ROOT / "build" / "tests.xml")
    parser.add_argument("--most", type=int, default=50)
    options = parser.parse_args()
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    text = table(durations(options.junit), options.most)
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{after}")
    print(text, end="")


if __name__ == "__main__":
    main()
