"""The folder that a data set is made in, so that a kill at any moment loses and breaks nothing.

While it is made, all of it lies in ``OUT/.preparing/``, with the settings it was begun with and a
note of each unit of work (a shard, or some files) that is whole. When everything is written and
verified, its parts are moved to their places, and the settings with them, as ``prepare.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ..errors import DataError

#: What a finished data set says of itself.
RESULT = "prepare.json"
WORK = ".preparing"
_STATE = "state.json"
_VERSION = 1


class Workplace:
    """The folder of a data set, held by one process at a time.

    Args:
        out: the folder. It is made where it is missing.
        settings: what decides the bytes that are written.

    Attributes:
        result: of a data set that is finished already, with these settings; else None.
        work: the folder to write in.
        notes: the folder of notes on units that are whole.

    Raises:
        DataError: ``out`` holds something else, or the same with other settings, or cannot be made.
    """

    def __init__(self, out: str | os.PathLike[str], settings: dict[str, Any]) -> None:
        self.out = Path(out).absolute()
        self.work = self.out / WORK
        self.notes = self.work / "notes"
        self.result: dict[str, Any] | None = None
        self._settings = {"layout": _VERSION, **settings}
        self._state: dict[str, Any] = {}
        self._lock: IO[str] | None = None
        self._made: list[Path] = []

    def __enter__(self) -> Workplace:
        try:
            if not self._recognise():
                self._claim()
        except OSError as error:
            self._release()
            raise self.broken(error) from error
        except DataError:
            self._release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self.result is None:
            with contextlib.suppress(OSError):
                self._tidy()
        self._release()

    def broken(self, error: OSError) -> DataError:
        """What to tell when the folder cannot be written to."""
        return DataError(f"{self.out} cannot be made: {error.strerror or error}")

    def agree(self, name: str, value: object) -> None:
        """Hold what has been found of the source to what it was when the work was begun.

        Raises:
            DataError: it was another.
        """
        done = self.result is not None
        found = self._state["source"]
        if name not in found and not done:
            found[name] = value
            self._save()
        elif found.get(name) != value:
            raise DataError(
                f"{self.out} was {'made' if done else 'begun'} from other images than there are "
                f"now in {name}: name a new folder"
            )

    def is_checked(self, path: Path) -> bool:
        """Whether the checksum of an archive was found right before."""
        return bool(self._state["checked"].get(str(path)) == _stamp(path))

    def checked(self, path: Path) -> None:
        """Remember that the checksum of an archive is right."""
        self._state["checked"][str(path)] = _stamp(path)
        self._save()

    def publish(self, result: dict[str, Any]) -> None:
        """Move what is whole and verified to its place.

        Raises:
            OSError: something is in the way there.
        """
        _write_json(
            self.work / RESULT,
            {"settings": self._settings, "source": self._state["source"], **result},
        )
        self._move()

    def _recognise(self) -> bool:
        """Whether it is finished. Raises where it is not and cannot be begun or gone on with."""
        try:
            entries = set(os.listdir(self.out))
        except FileNotFoundError:
            return False
        if RESULT in entries:
            self.result = _read_json(self.out / RESULT)
            self._compare(self.result.get("settings", {}), f"{self.out} holds a data set made")
            self._state = self.result
            shutil.rmtree(self.work, ignore_errors=True)
            return True
        if entries - {WORK} and not (self.work / _STATE).exists():
            raise DataError(f"{self.out} is not empty and is not this data set: name a new folder")
        return False

    def _claim(self) -> None:
        self._make(self.work)
        self._hold()
        if self._recognise():  # by another process, until a moment ago
            return
        if (self.work / _STATE).exists():
            self._state = _read_json(self.work / _STATE)
            self._compare(self._state["settings"], f"{self.out} was begun")
            if (self.work / RESULT).exists():  # it was whole, and killed while it was moved
                self._move()
                self.result = _read_json(self.out / RESULT)
        else:
            self._state = {"settings": self._settings, "source": {}, "checked": {}}
            self._save()
        if self.result is None:
            self.notes.mkdir(exist_ok=True)

    def _hold(self) -> None:
        """One process at a time; the lock ends with the process, however it ends."""
        self._lock = (self.work / "lock").open("w")
        try:
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{self.out} is being written by another process") from None
        except (ImportError, OSError):
            pass  # no locks on this system or file system

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _make(self, folder: Path) -> None:
        """With its parents, remembering what was not there."""
        missing = [folder, *folder.parents]
        for path in reversed(missing):
            if not path.exists():
                path.mkdir()
                self._made.insert(0, path)

    def _move(self) -> None:
        # Training images last: nothing can be trained on before all is in its place.
        for split in ("val", "train"):
            if (self.work / split).exists():
                os.rename(self.work / split, self.out / split)
        os.rename(self.work / RESULT, self.out / RESULT)
        shutil.rmtree(self.work, ignore_errors=True)

    def _tidy(self) -> None:
        """Leave nothing where nothing had been done."""
        if self._state and not self._state["checked"] and not any(self.notes.glob("*")):
            shutil.rmtree(self.work, ignore_errors=True)
            for path in self._made[1:]:
                path.rmdir()

    def _compare(self, theirs: dict[str, Any], what: str) -> None:
        ours = self._settings
        differing = [
            f"{name}={_text(theirs.get(name))}, not {_text(ours.get(name))}"
            for name in {**theirs, **ours}
            if theirs.get(name) != ours.get(name)
        ]
        if differing:
            raise DataError(
                f"{what} with {'; '.join(differing)}: give the same, or name a new folder"
            )

    def _save(self) -> None:
        _write_json(self.work / _STATE, self._state)


def _text(value: object) -> str:
    return "none" if value is None else str(value)


def _stamp(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} cannot be read ({error}): name a new folder") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not what data prepare wrote: name a new folder")
    return content
