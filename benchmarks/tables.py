"""Where the benchmarks write their results, which the pages in docs/results include."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
