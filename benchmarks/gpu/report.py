"""Results of one call: checks, table rows and goals, on disk as soon as they are known.

All parts of a call share one JSON file, which is replaced atomically at each result, so that a call
that is killed keeps its results. This file needs only the standard library.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Content = dict[str, Any]

#: Outcomes of a check. ``wrong`` says that a step computes something else than it should, and what
#: rests on it is not measured. ``failed`` says that the check could not be made, or found something
#: that changes no result. ``late`` has no outcome for lack of time.
OK, WRONG, FAILED, LATE, SKIPPED = "ok", "wrong", "failed", "late", "skipped"


@dataclass(frozen=True)
class Case:
    """A named check."""

    name: str
    run: Callable[[Any], None]
    says_wrong: bool = True


class Skipped(Exception):  # noqa: N818 - not an error
    """Raised when something cannot be done on this machine; the message is the reason."""


def outcome(
    function: Callable[..., object], *arguments: Any, says_wrong: bool = True
) -> tuple[str, str]:
    """Run a check; return its state and, unless that is ``ok``, the reason."""
    try:
        function(*arguments)
    except Skipped as reason:
        return SKIPPED, str(reason)
    except AssertionError as error:
        return WRONG if says_wrong else FAILED, error_line(error)
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's
            return SKIPPED, "out of memory"
        return FAILED, error_line(error)
    return OK, ""


def read(file: Path) -> Content:
    """Read a results file."""
    content: Content = json.loads(file.read_text())
    return content


def write(file: Path, content: Content) -> None:
    """Replace a results file atomically."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, file)


def new_section(title: str) -> Content:
    """Return the section of a part that has not ended."""
    lists: Content = {key: [] for key in ("checks", "goals", "skipped", "notes")}
    return {"title": title, "state": "running", "reason": "", "seconds": 0.0, "tables": {}} | lists


class Report:
    """A part's section of an existing results file; it must end at ``deadline``, as
    ``time.monotonic`` counts."""

    def __init__(self, file: Path, name: str, deadline: float) -> None:
        self.file, self._name, self._deadline = file, name, deadline
        self._start = time.monotonic()
        self._device = read(file)["machine"]["device"]
        self.content = new_section(name)
        self._save()

    @property
    def seconds_left(self) -> float:
        """Time left to the part."""
        return self._deadline - time.monotonic()

    def has_time(self, what: str, seconds: float = 0.0, spared: float = 0.0) -> bool:
        """Whether ``seconds`` are left for ``what`` beside those spared; if not, say so."""
        left = self.seconds_left - spared
        if left > seconds:
            return True
        self.skip(what, f"no time: {max(0, left):.0f} s left, about {seconds:.0f} s needed")
        return False

    def row(self, table: str, *, rests_on: tuple[str, ...] = (), **values: Any) -> None:
        """Add a row to a table; the keys are the column heads, with ``_`` for spaces.

        ``rests_on`` is as for :meth:`doubts`, which the row names.
        """
        doubts = "; ".join(self.doubts(rests_on))
        row = values | {"device": self._device} | ({"not_checked": doubts} if doubts else {})
        self.content["tables"].setdefault(table, []).append(row)
        self._log(table, ", ".join(f"{k} {shown(v)}" for k, v in values.items()))

    def note(self, text: str) -> None:
        """Add a line under the tables."""
        self.content["notes"].append(text)
        self._log("note", text)

    def skip(self, what: str, reason: str) -> None:
        """Record that something was not done."""
        self.content["skipped"].append({"what": what, "reason": reason})
        self._log("skipped", f"{what}: {reason}")

    def check(self, what: str, function: Callable[..., object], *arguments: Any) -> None:
        """Run a check here and record its outcome."""
        self.record(what, *outcome(function, *arguments))

    def record(self, what: str, state: str, reason: str = "") -> None:
        """Record the outcome of a check, or that it was skipped."""
        if state == SKIPPED:
            self.skip(what, reason)
            return
        self.content["checks"].append({"check": what, "state": state, "reason": reason})
        self._log("check", f"{what}: {state}{': ' if reason else ''}{reason}")

    def goal(self, what: str, reached: float, *, least: float = 0.0, most: float = 0.0) -> None:
        """Compare a figure with a goal: at least ``least``, or at most ``most``."""
        met = reached <= most if most else reached >= least
        asked = f"at most {most:g}" if most else f"at least {least:g}"
        goal = {"goal": what, "reached": reached, "asked": asked, "met": "met" if met else "missed"}
        self.content["goals"].append(goal | {"device": self._device})
        self._log("goal", f"{what}: {shown(reached)}, {asked}: {goal['met']}")

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Go on after a body that raises, and record the reason."""
        try:
            yield
        except Exception as error:
            self.record(what, *outcome(_raise, error, says_wrong=False))

    def doubts(self, rests_on: tuple[str, ...], state: str = "") -> list[str]:
        """Return the checks of this call that are not ``ok``, by the first words of their names."""
        checks = [c for part in read(self.file)["parts"].values() for c in part["checks"]]
        found = []
        for start in rests_on:
            of_start = [c for c in checks if f"{c['check']},".startswith(f"{start},")]
            if not of_start and not state:
                found.append(start)
            bad = [c for c in of_start if c["state"] == (state or c["state"]) != OK]
            found += [f"{check['check']}: {check['state']}" for check in bad]
        return found if len(found) < 4 else [*found[:2], f"{len(found) - 2} more"]

    def finish(self, state: str, reason: str = "") -> None:
        """Close the section with the state ``ok``, ``failed`` or ``skipped``."""
        self.content |= {"state": state, "reason": reason}
        self._save()

    def _log(self, kind: str, text: str) -> None:
        print(f"{self._name}: {kind}: {text}", flush=True)
        self._save()

    def _save(self) -> None:
        self.content["seconds"] = round(time.monotonic() - self._start, 1)
        content = read(self.file)
        content["parts"][self._name] = self.content
        write(self.file, content)


def _raise(error: Exception) -> None:
    raise error


def error_line(error: BaseException) -> str:
    """Return an error's type and message in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}" if lines else type(error).__name__


def shown(value: Any) -> str:
    """Format a value for a table, numbers with at least three digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    decimals = next((n for n, limit in enumerate((100, 10, 1, 0.1)) if abs(value) >= limit), 4)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{decimals}f}"


def table(rows: list[Content]) -> str:
    """Format rows as a Markdown table with a column for each key that occurs."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    numeric = {k for k in keys if all(isinstance(r.get(k, 0), (int, float)) for r in rows)}
    lines = ["| " + " | ".join(key.replace("_", " ") for key in keys) + " |"]
    lines.append("|" + "|".join("---:" if key in numeric else "---" for key in keys) + "|")
    lines += ["| " + " | ".join(shown(row.get(key, "")) for key in keys) + " |" for row in rows]
    return "\n".join(lines)


def markdown(content: Content) -> str:
    """Format a results file, what matters most at its end: goals, and before them the tables.

    Tables of a part are in the opposite order of their first rows.
    """
    parts = content["parts"]
    where = ", ".join(f"{value}" for value in content["machine"].values())
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    text = [f"## Call {content['call']}\n\n{content['date']}, {where}, {versions}"]
    if content["dry"]:
        text.append("Dry run on the CPU: it shows that the harness runs, and measures nothing.")
    states = []
    for part in parts.values():
        of_state = [check["state"] for check in part["checks"]]
        counts = {state: of_state.count(state) for state in (OK, WRONG, FAILED, LATE)}
        row = {"part": part["title"], "state": part["state"], **counts}
        row |= {"skipped": len(part["skipped"]), "seconds": part["seconds"]}
        states.append(row | {"reason": part["reason"]})
    text.append(f"### Parts\n\n{table(states)}")

    def listed(head: str, lines: list[str]) -> None:
        if lines:
            text.append(f"### {head}\n\n" + "\n".join(f"- {line}" for line in lines))

    skipped = [skip for part in parts.values() for skip in part["skipped"]]
    listed("Skipped", [f"{skip['what']}: {skip['reason']}" for skip in skipped])
    for part in parts.values():
        if part["tables"] or part["notes"]:
            text.append(f"### {part['title']}")
        text += [f"{head}:\n\n{table(rows)}" for head, rows in reversed(part["tables"].items())]
        if part["notes"]:
            text.append("\n".join(f"- {note}" for note in part["notes"]))
    checks = [c for part in parts.values() for c in part["checks"] if c["state"] != OK]
    listed("Checks", [f"{c['check']}: {c['state']}: {c['reason']}" for c in checks])
    goals = [goal for part in parts.values() for goal in part["goals"]]
    if goals:
        text.append(f"### Goals\n\n{table(goals)}")
    return "\n\n".join(text) + "\n"


def exit_code(content: Content) -> int:
    """Return 1 if a part failed, or a check failed or found something wrong, else 0."""
    parts = content["parts"].values()
    states = [part["state"] for part in parts]
    states += [check["state"] for part in parts for check in part["checks"]]
    return int(WRONG in states or FAILED in states)
