"""What a part finds: rows, checks and goals, on disk as soon as they are known.

All parts share one JSON file, which is written anew at each finding and put in place at once, so
that a run that is killed leaves what it had found. It needs nothing but Python.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Content = dict[str, Any]


class Skipped(Exception):  # noqa: N818 - not an error
    """Something that cannot be done here; the message is the reason."""


def read(file: Path) -> Content:
    """What is in a file of results."""
    content: Content = json.loads(file.read_text())
    return content


def write(file: Path, content: Content) -> None:
    """Put a file of results in place."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, file)


class Report:
    """One part's section in the file of results.

    Args:
        file: exists, and has a key ``parts``.
        name: of the part.
        title: of the part.
        seconds: that it may take.
    """

    def __init__(self, file: Path, name: str, title: str, seconds: float) -> None:
        self._file, self._name = file, name
        self._start = time.monotonic()
        self._seconds = seconds
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
        """Of the part's share of the time."""
        return self._seconds - (time.monotonic() - self._start)

    def has_time(self, what: str, seconds: float = 0.0) -> bool:
        """Whether ``seconds`` are left for ``what``; noted as skipped if they are not."""
        left = self.seconds_left
        if left > seconds:
            return True
        self.skip(what, f"no time: {max(0, left):.0f} s left, about {seconds:.0f} s needed")
        return False

    def row(self, table: str, **values: Any) -> None:
        """Add a row; the keys are the columns' heads, with ``_`` for spaces."""
        self.content["tables"].setdefault(table, []).append(values)
        self._tell(table, ", ".join(f"{k} {shown(v)}" for k, v in values.items()))

    def note(self, text: str) -> None:
        """Add a line under the tables."""
        self.content["notes"].append(text)
        self._tell("note", text)

    def skip(self, what: str, reason: str) -> None:
        """Note that something was not done."""
        self.content["skipped"].append({"what": what, "reason": reason})
        self._tell("skipped", f"{what}: {reason}")

    def goal(self, what: str, reached: float, *, least: float = 0.0, most: float = 0.0) -> None:
        """Hold a ratio to a goal: at least ``least``, or at most ``most``."""
        met = reached <= most if most else reached >= least
        asked = f"at most {most:g}" if most else f"at least {least:g}"
        self.content["goals"].append({"goal": what, "reached": reached, "asked": asked, "met": met})
        self._tell("goal", f"{what}: {shown(reached)}, {asked}: {'met' if met else 'missed'}")

    def check(self, what: str, function: Callable[..., object], *arguments: Any) -> None:
        """Run a check, which raises if it fails, or :class:`Skipped`; nothing is raised here."""
        with self.attempt(what):
            function(*arguments)
            self.content["checks"].append({"check": what, "state": "ok", "error": ""})
            self._tell("check", f"{what}: ok")

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Go on after a body that raises: :class:`Skipped` or no memory is one thing skipped,
        anything else a check that failed."""
        try:
            yield
        except Skipped as reason:
            self.skip(what, str(reason))
        except Exception as error:
            if type(error).__name__ == "OutOfMemoryError":  # torch's
                self.skip(what, "out of memory")
                return
            self.content["checks"].append({"check": what, "state": "failed", "error": told(error)})
            self._tell("check", f"{what}: failed: {told(error)}")

    def finish(self, state: str, reason: str = "") -> None:
        """Close the section: ``ok``, ``failed`` or ``skipped``."""
        if state == "ok" and any(check["state"] == "failed" for check in self.content["checks"]):
            state, reason = "failed", "a check failed"
        self.content |= {"state": state, "reason": reason}
        self._save()

    def _tell(self, kind: str, text: str) -> None:
        print(f"{self._name}: {kind}: {text}", flush=True)
        self._save()

    def _save(self) -> None:
        self.content["seconds"] = round(time.monotonic() - self._start, 1)
        content = read(self._file)
        content["parts"][self._name] = self.content
        write(self._file, content)


def told(error: BaseException) -> str:
    """An error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}" if lines else type(error).__name__


def shown(value: Any) -> str:
    """A value of a table, three digits at least."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    return next((n for n, limit in enumerate((100, 10, 1, 0.1)) if abs(value) >= limit), 4)


def table(rows: list[Content]) -> str:
    """Rows as a table in Markdown; a column for each key that any of them has."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    numeric = {k for k in keys if all(isinstance(r.get(k, 0), (int, float)) for r in rows)}
    lines = ["| " + " | ".join(key.replace("_", " ") for key in keys) + " |"]
    lines.append("|" + "|".join("---:" if key in numeric else "---" for key in keys) + "|")
    lines += ["| " + " | ".join(shown(row.get(key, "")) for key in keys) + " |" for row in rows]
    return "\n".join(lines)


def markdown(content: Content) -> str:
    """The whole file of results, to read."""
    where = ", ".join(f"{value}" for value in content["machine"].values())
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    text = [f"{content['date']}, {where}, {versions}"]
    if content["dry"]:
        text.insert(0, "Dry run on the CPU: it shows that the harness runs, and measures nothing.")
    for part in content["parts"].values():
        reason = f": {part['reason']}" if part["reason"] else ""
        text.append(f"### {part['title']}\n\n{part['state']}{reason}, {part['seconds']:.0f} s")
        text += [f"{title}:\n\n{table(rows)}" for title, rows in part["tables"].items()]
        failed = [check for check in part["checks"] if check["state"] == "failed"]
        if part["checks"]:
            text.append(f"{len(part['checks'])} checks, {len(failed)} failed")
        if failed:
            text.append("\n".join(f"- {check['check']}: {check['error']}" for check in failed))
        if part["goals"]:
            goals = [g | {"met": "met" if g["met"] else "missed"} for g in part["goals"]]
            text.append(table(goals))
        if part["notes"]:
            text.append("\n".join(f"- {note}" for note in part["notes"]))
        if part["skipped"]:
            skipped = [f"- {skip['what']}: {skip['reason']}" for skip in part["skipped"]]
            text.append("Skipped:\n\n" + "\n".join(skipped))
    return "\n\n".join(text) + "\n"


def summary(content: Content) -> str:
    """What to say at the end, a line for each part and goal."""
    lines = []
    for name, part in content["parts"].items():
        checks = part["checks"]
        failed = [check for check in checks if check["state"] == "failed"]
        counts = f"{len(checks) - len(failed)} of {len(checks)} checks ok" if checks else ""
        counts += f"{', ' if counts else ''}{len(part['skipped'])} skipped"
        reason = f": {part['reason']}" if part["reason"] else ""
        lines.append(f"{part['state']:8}{name:12}{part['seconds']:6.0f} s  {counts}{reason}")
        lines += [f"        failed: {check['check']}: {check['error']}" for check in failed]
        lines += [
            f"        {'met' if goal['met'] else 'missed'}: {goal['goal']}: "
            f"{shown(goal['reached'])}, {goal['asked']}"
            for goal in part["goals"]
        ]
    return "\n".join(lines)


def exit_code(content: Content) -> int:
    """1 if a check or a part failed."""
    return int(any(part["state"] == "failed" for part in content["parts"].values()))
