"""Results of the parts: table rows, checks and goals, written to disk as soon as they are known.

All parts share one JSON file, which is replaced atomically at each result, so that a killed run
keeps its results. This file needs only the standard library.
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


@dataclass(frozen=True)
class Case:
    """A named check.

    Attributes:
        name: for the report.
        run: takes the device, and raises if the check fails.
        seconds: what it may take; it is not begun with less.
    """

    name: str
    run: Callable[[Any], None]
    seconds: float = 5.0


class Skipped(Exception):  # noqa: N818 - not an error
    """Raised when something cannot be done on this machine; the message is the reason."""


def read(file: Path) -> Content:
    """Read a results file."""
    content: Content = json.loads(file.read_text())
    return content


def write(file: Path, content: Content) -> None:
    """Replace a results file atomically."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, file)


class Report:
    """One part's section of the results file.

    Args:
        file: an existing results file with a key ``parts``.
        name: name of the part.
        title: title of the part.
        seconds: time limit of the part.
    """

    def __init__(self, file: Path, name: str, title: str, seconds: float) -> None:
        self.file, self._name = file, name
        #: The tables of an earlier run of this part, which this run replaces.
        self.earlier: Content = read(file)["parts"].get(name, {}).get("tables", {})
        self._start = time.monotonic()
        self._seconds = seconds
        self._without_time = 0
        self.content: Content = {
            "title": title,
            "state": "running",
            "reason": "",
            "seconds": 0.0,
            "tables": {},
            "checks": [],
            "goals": [],
            "skipped": [],
            "notes": [],
        }
        self._save()

    @property
    def seconds_left(self) -> float:
        """Time left of the part's share."""
        return self._seconds - (time.monotonic() - self._start)

    def has_time(self, what: str, seconds: float = 0.0) -> bool:
        """Whether ``seconds`` are left for ``what``; otherwise :meth:`no_time` is called."""
        left = self.seconds_left
        if left > seconds:
            return True
        self.no_time(what, f"{max(0, left):.0f} s left, about {seconds:.0f} s needed")
        return False

    def no_time(self, what: str, reason: str) -> None:
        """Record that something was not done for lack of time, which the summary says too."""
        self._without_time += 1
        self.skip(what, f"no time: {reason}")

    def row(self, table: str, **values: Any) -> None:
        """Add a row to a table; the keys are the column heads, with ``_`` for spaces."""
        self.content["tables"].setdefault(table, []).append(values)
        self._log(table, ", ".join(f"{k} {shown(v)}" for k, v in values.items()))

    def note(self, text: str) -> None:
        """Add a line under the tables."""
        self.content["notes"].append(text)
        self._log("note", text)

    def skip(self, what: str, reason: str) -> None:
        """Record that something was not done."""
        self.content["skipped"].append({"what": what, "reason": reason})
        self._log("skipped", f"{what}: {reason}")

    def fail(self, what: str, reason: str) -> None:
        """Record a failed check."""
        self.content["checks"].append({"check": what, "state": "failed", "error": reason})
        self._log("check", f"{what}: failed: {reason}")

    def goal(self, what: str, reached: float, *, least: float = 0.0, most: float = 0.0) -> None:
        """Compare a ratio with a goal: at least ``least``, or at most ``most``."""
        met = reached <= most if most else reached >= least
        asked = f"at most {most:g}" if most else f"at least {least:g}"
        self.content["goals"].append({"goal": what, "reached": reached, "asked": asked, "met": met})
        self._log("goal", f"{what}: {shown(reached)}, {asked}: {'met' if met else 'missed'}")

    def check(self, what: str, function: Callable[..., object], *arguments: Any) -> None:
        """Run a check and record its outcome.

        The function raises if the check fails, or :class:`Skipped`; this method never raises.
        """
        with self.attempt(what):
            function(*arguments)
            self.content["checks"].append({"check": what, "state": "ok", "error": ""})
            self._log("check", f"{what}: ok")

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Continue after a body that raises, and record the reason.

        :class:`Skipped` and an out-of-memory error are recorded as skipped, anything else as a
        failed check.
        """
        try:
            yield
        except Skipped as reason:
            self.skip(what, str(reason))
        except Exception as error:
            if type(error).__name__ == "OutOfMemoryError":  # torch's
                self.skip(what, "out of memory")
                return
            self.fail(what, error_line(error))

    def finish(self, state: str, reason: str = "") -> None:
        """Close the section with the state ``ok``, ``failed`` or ``skipped``."""
        if state == "ok" and any(check["state"] == "failed" for check in self.content["checks"]):
            state, reason = "failed", "a check failed"
        if state != "skipped" and self._without_time:
            reason += f"{'; ' if reason else ''}no time for {self._without_time} more"
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


def error_line(error: BaseException) -> str:
    """Return an error's type and message in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}" if lines else type(error).__name__


def shown(value: Any) -> str:
    """Format a value for a table, numbers with at least three digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    return next((n for n, limit in enumerate((100, 10, 1, 0.1)) if abs(value) >= limit), 4)


def table(rows: list[Content]) -> str:
    """Format rows as a Markdown table with a column for each key that occurs."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    numeric = {k for k in keys if all(isinstance(r.get(k, 0), (int, float)) for r in rows)}
    lines = ["| " + " | ".join(key.replace("_", " ") for key in keys) + " |"]
    lines.append("|" + "|".join("---:" if key in numeric else "---" for key in keys) + "|")
    lines += ["| " + " | ".join(shown(row.get(key, "")) for key in keys) + " |" for row in rows]
    return "\n".join(lines)


def markdown(content: Content) -> str:
    """Format a whole results file as Markdown: goals and failures first, then each part's tables,
    then what was skipped and where it ran."""
    parts = content["parts"]
    text = []
    if content["dry"]:
        text.append("Dry run on the CPU: it shows that the harness runs, and measures nothing.")
    goals = [goal for part in parts.values() for goal in part["goals"]]
    if goals:
        rows = [goal | {"met": "met" if goal["met"] else "missed"} for goal in goals]
        text.append(f"### Goals\n\n{table(rows)}")
    states = []
    for part in parts.values():
        checks = part["checks"]
        failed = [check for check in checks if check["state"] == "failed"]
        row = {"part": part["title"], "state": part["state"], "checks": len(checks)}
        row |= {"failed": len(failed), "skipped": len(part["skipped"])}
        states.append(row | {"seconds": part["seconds"], "reason": part["reason"]})
    text.append(f"### Parts\n\n{table(states)}")
    failures = [
        f"- {check['check']}: {check['error']}"
        for part in parts.values()
        for check in part["checks"]
        if check["state"] == "failed"
    ]
    if failures:
        text.append("### Failed\n\n" + "\n".join(failures))
    for part in parts.values():
        if part["tables"] or part["notes"]:
            text.append(f"### {part['title']}")
        text += [f"{title}:\n\n{table(rows)}" for title, rows in part["tables"].items()]
        if part["notes"]:
            text.append("\n".join(f"- {note}" for note in part["notes"]))
    skipped = [
        f"- {part['title']}: {skip['what']}: {skip['reason']}"
        for part in parts.values()
        for skip in part["skipped"]
    ]
    if skipped:
        text.append("### Skipped\n\n" + "\n".join(skipped))
    where = ", ".join(f"{value}" for value in content["machine"].values())
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    text.append(f"### Machine\n\n{content['date']}, {where}, {versions}")
    return "\n\n".join(text) + "\n"


def summary(content: Content) -> str:
    """Format the summary printed at the end, with a line for each part and goal."""
    lines = []
    for name, part in content["parts"].items():
        checks = part["checks"]
        failed = [check for check in checks if check["state"] == "failed"]
        counts = f"{len(checks) - len(failed)} of {len(checks)} checks ok" if checks else ""
        counts += f"{', ' if counts else ''}{len(part['skipped'])} skipped"
        reason = f": {part['reason']}" if part["reason"] else ""
        lines.append(f"{part['state']:8}{name:13}{part['seconds']:6.0f} s  {counts}{reason}")
        lines += [f"        failed: {check['check']}: {check['error']}" for check in failed]
        lines += [
            f"        {'met' if goal['met'] else 'missed'}: {goal['goal']}: "
            f"{shown(goal['reached'])}, {goal['asked']}"
            for goal in part["goals"]
        ]
    return "\n".join(lines)


def exit_code(content: Content) -> int:
    """Return 1 if a check or a part failed, else 0."""
    return int(any(part["state"] == "failed" for part in content["parts"].values()))
