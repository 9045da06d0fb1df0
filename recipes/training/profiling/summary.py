"""The page about a profile: what costs most, what is hidden, and what is idle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..phases import ALL_REDUCE_WAIT, HOST_TO_DEVICE
from .figures import BETWEEN, Cost, Figures
from .picture import PICTURE

SUMMARY = "summary.md"

#: Most ranks that have a column in the tables, the first ones.
MOST_RANKS = 8

#: Number of the largest costs that are listed.
MOST = 5

_OF_GPU = (
    "Times are those of the GPU's kernels. Idle is the time in which nothing ran on it, copies "
    "included; the wait for input is the part of it in which the host waited for a micro-batch. "
    "Copies run beside the other phases. Communication is hidden while kernels compute."
)
_NO_KERNELS = (
    "This rank computed on a GPU, but torch.profiler recorded no kernels: the figures are those of "
    "the main thread, which runs ahead of the GPU. Another profiler may be attached to the process."
)
_OF_CPU = (
    "Times are those of the main thread; an operator's own time leaves out those that it calls. On "
    "a CPU nothing tells when a core is idle. Idle is the time in which the main thread waits for "
    "its input or for the all-reduce; meanwhile threads of the input and of gloo use the same "
    "cores. Communication is hidden while the main thread does not wait."
)
_FILES = (
    "`rank-N.json.gz` opens in https://ui.perfetto.dev; several opened together lie on one time "
    "axis, as far as the clocks of their machines agree. The profiler slows steps down, those with "
    "many small operators most: compare shares, and take times "
    "from lines of metrics.jsonl without recorded steps."
)


def page(name: str, found: Sequence[Figures], world_size: int) -> str:
    """Return the page in Markdown.

    Args:
        name: Name of the recipe.
        found: Figures of the ranks that recorded.
        world_size: Number of ranks of the run.
    """
    first, in_tables = found[0], found[:MOST_RANKS]
    ranks = ", ".join(str(figures.rank) for figures in found)
    of = f"rank{'s' * (len(found) > 1)} {ranks} of {world_size}"
    each = first.seconds / len(first.steps)
    lines = [
        f"# {name}: profile of {_steps(first)}",
        "",
        f"Recorded on {of}; {_time(each)} a step on rank {first.rank}, "
        f"on a {'GPU' if first.on_gpu or first.lacks_kernels else 'CPU'}.",
        "",
        f"## The {MOST} largest costs, rank {first.rank}",
        "",
        "| what | phase | share | a step | calls a step |",
        "|---|---|---:|---:|---:|",
        *(_row(cost, first) for cost in first.costs[:MOST]),
        "",
        "## Phases",
        "",
        *_table(
            in_tables,
            [
                (phase, [f.phases.get(phase, 0.0) for f in in_tables])
                for phase in dict.fromkeys(p for f in in_tables for p in f.phases)
            ],
        ),
        "",
        f"## Step {first.shown}",
        "",
        f"![Step {first.shown}: phases and communication]({PICTURE})",
        "",
        "## Communication and idle time",
        "",
        *_communication(in_tables),
        "",
        _OF_GPU if first.on_gpu else _NO_KERNELS if first.lacks_kernels else _OF_CPU,
        "",
    ]
    if len(found) > MOST_RANKS:
        lines += [f"Shown are the first {MOST_RANKS} of the {len(found)} ranks that recorded.", ""]
    if not (first.on_gpu or first.lacks_kernels):
        lines += [f"There is no phase {HOST_TO_DEVICE}: images stay on the host.", ""]
    return "\n".join([*lines, _FILES, ""])


def in_lines(first: Figures, folder: Path) -> list[str]:
    """Return the page in a few lines, for the terminal."""
    phases = sorted(first.phases.items(), key=lambda entry: -entry[1])
    shares = [f"{name} {seconds / first.seconds:.0%}" for name, seconds in phases]
    costs = [f"{_title(cost)} {cost.seconds / first.seconds:.0%}" for cost in first.costs[:MOST]]
    idle = f"idle {first.idle / first.seconds:.0%}"
    if first.communication:
        under_way = _time(first.communication / len(first.steps))
        hidden = first.hidden / first.communication
        what = "communication" if first.on_gpu else "all-reduce"
        idle = f"{what} {under_way} a step, of which {hidden:.0%} hidden; {idle}"
    each = _time(first.seconds / len(first.steps))
    if first.lacks_kernels:
        idle = "no kernels of the GPU were recorded: these are times of the main thread"
    return [
        f"profile of {_steps(first)} on rank {first.rank}, {each} a step: {', '.join(shares)}",
        f"  largest costs: {', '.join(costs)}",
        f"  {idle}",
        f"  {folder / SUMMARY}; open {folder}/rank-{first.rank}.json.gz in https://ui.perfetto.dev",
    ]


def _steps(figures: Figures) -> str:
    first, last = figures.steps[0], figures.steps[-1]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _title(cost: Cost) -> str:
    """A short name: of a phase's own time, that it is outside of operators."""
    if cost.name == cost.phase and cost.name in ("forward", "backward", "optimizer", "meters"):
        return f"{cost.name}, outside of operators"
    name = cost.name.removeprefix("aten::").removeprefix("void ")
    return name if len(name) <= 60 else f"{name[:57]}..."


def _row(cost: Cost, figures: Figures) -> str:
    count = len(figures.steps)
    phase = "" if cost.phase in (cost.name, BETWEEN) else cost.phase
    calls = f"{cost.calls / count:.3g}" if cost.calls else ""
    return (
        f"| {_title(cost)} | {phase} | {cost.seconds / figures.seconds:.1%} "
        f"| {_time(cost.seconds / count)} | {calls} |"
    )


def _table(found: Sequence[Figures], rows: list[tuple[str, list[float]]]) -> list[str]:
    """A table of shares of the time of the steps, with a column for each rank."""
    lines = [
        f"| | {' | '.join(f'rank {figures.rank}' for figures in found)} |",
        f"|---|{'---:|' * len(found)}",
    ]
    for name, seconds in rows:
        cells = [f"{s / figures.seconds:.1%}" for s, figures in zip(seconds, found, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _communication(found: Sequence[Figures]) -> list[str]:
    what = "communication" if found[0].on_gpu else "an all-reduce"
    lines = _table(
        found,
        [
            (f"{what} is under way", [f.communication for f in found]),
            ("of that hidden behind computation", [f.hidden for f in found]),
            (ALL_REDUCE_WAIT, [f.phases.get(ALL_REDUCE_WAIT, 0.0) for f in found]),
            ("idle", [f.idle for f in found]),
        ],
    )
    if not any(figures.communication for figures in found):
        return [
            lines[0],
            lines[1],
            lines[-1],
            "",
            f"No {what.removeprefix('an ')} was seen in these steps.",
        ]
    shares = ", ".join(
        f"{f.hidden / f.communication:.0%} on rank {f.rank}" for f in found if f.communication
    )
    return [*lines, "", f"Of the communication, {shares} is hidden."]
