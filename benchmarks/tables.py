"""Put the tables of benchmarks/results/ into the README, each between its own pair of marks.

    python -m benchmarks.tables

A pair of marks is ``<!-- table NAME -->`` and ``<!-- end NAME -->``, for results/NAME.md.
"""

from __future__ import annotations

import re
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"

_MARKED = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def filled(text: str) -> str:
    """``text`` with the newest tables between its marks."""

    def table(match: re.Match[str]) -> str:
        content = (RESULTS / f"{match[2]}.md").read_text().strip()
        return f"{match[1]}\n{content}\n\n{match[3]}"

    return _MARKED.sub(table, text)


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
