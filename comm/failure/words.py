"""Names of ranks in messages."""

from __future__ import annotations

from collections.abc import Sequence


def ranks_named(numbers: Sequence[int]) -> str:
    """Return ascending ranks in words: ``rank 3``, ``ranks 0 and 2``, ``ranks 0 to 6 and 9``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words: list[str] = []
    for run in runs:
        words += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    listed = " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return f"ranks {listed}" if len(numbers) > 1 else f"rank {listed}"
