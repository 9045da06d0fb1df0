"""The folder in which a data set is written, such that a kill at any moment does no harm.

Until it is complete, everything lies in ``OUT/.preparing/``, together with the settings and a note
for each completed unit of work (a shard, or a batch of files). Once everything is written and
verified, the splits are moved into ``OUT``, together with the settings as ``prepare.json``.
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

#: The file that describes a finished data set.
RESULT = "prepare.json"
WORK = ".preparing"
_STATE = "state.json"
_VERSION = 1


class WorkDir:
    """The folder of a data set, locked by one process at a time.

    Args:
        out: Path of the folder, which is created if it is missing.
        settings: The settings that determine the bytes written.

    Attributes:
        result: Description of the data set if it is already finished; else None.
        work: The folder to write to.
        notes: The folder of the notes on completed units.

    Raises:
        DataError: ``out`` holds something else or a data set with other settings, or cannot be
            created.
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

    def __enter__(self) -> WorkDir:
        try:
            if not self._is_finished():
                self._claim()
        except OSError as error:
            self._release()
            raise self.write_error(error) from error
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

    def write_error(self, error: OSError) -> DataError:
        """Return the error for a folder that cannot be written."""
        return DataError(f"{self.out} cannot be written: {error.strerror or error}")

    def check_source(self, name: str, value: object) -> None:
        """Check that a fact about the source is the same as in earlier calls.

        Raises:
            DataError: The source has changed.
        """
        done = self.result is not None
        found = self._state["source"]
        if name not in found and not done:
            found[name] = value
            self._save()
        elif found.get(name) != value:
            raise DataError(
                f"{self.out} was {'written' if done else 'started'} from other images than {name} "
                "has now; valid: a new folder"
            )

    def is_verified(self, path: Path) -> bool:
        """Whether an earlier call has verified the checksum of an archive."""
        return bool(self._state["checked"].get(str(path)) == _stamp(path))

    def mark_verified(self, path: Path) -> None:
        """Record that the checksum of an archive is correct."""
        self._state["checked"][str(path)] = _stamp(path)
        self._save()

    def publish(self, result: dict[str, Any]) -> None:
        """Move the written and verified data set to its final place.

        Raises:
            OSError: A file of that name exists there.
        """
        _write_json(
            self.work / RESULT,
            {"settings": self._settings, "source": self._state["source"], **result},
        )
        self._move()

    def _is_finished(self) -> bool:
        """Whether the data set is finished; raises if it can be neither started nor continued."""
        try:
            entries = set(os.listdir(self.out))
        except FileNotFoundError:
            return False
        if RESULT in entries:
            self.result = _read_json(self.out / RESULT)
            self._compare(self.result.get("settings", {}), f"{self.out} holds a data set written")
            self._state = self.result
            shutil.rmtree(self.work, ignore_errors=True)
            return True
        if entries - {WORK} and not (self.work / _STATE).exists():
            raise DataError(
                f"{self.out} is not empty and is not this data set; valid: a new folder"
            )
        return False

    def _claim(self) -> None:
        self._make(self.work)
        self._acquire()
        if self._is_finished():  # meanwhile, by another process
            return
        if (self.work / _STATE).exists():
            self._state = _read_json(self.work / _STATE)
            self._compare(self._state["settings"], f"{self.out} was started")
            if (self.work / RESULT).exists():  # killed while moving a complete data set
                self._move()
                self.result = _read_json(self.out / RESULT)
        else:
            self._state = {"settings": self._settings, "source": {}, "checked": {}}
            self._save()
        if self.result is None:
            self.notes.mkdir(exist_ok=True)

    def _acquire(self) -> None:
        """Lock the folder; the lock is released when the process ends for whatever reason."""
        self._lock = (self.work / "lock").open("w")
        try:
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{self.out} is being written by another process") from None
        except (ImportError, OSError):
            pass  # this system or file system has no locks

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _make(self, folder: Path) -> None:
        """Create a folder with its parents, and remember which were missing."""
        missing = [folder, *folder.parents]
        for path in reversed(missing):
            if not path.exists():
                path.mkdir()
                self._made.insert(0, path)

    def _move(self) -> None:
        # Training images last, so that nothing can be trained on before all is in place.
        for split in ("val", "train"):
            if (self.work / split).exists():
                os.rename(self.work / split, self.out / split)
        os.rename(self.work / RESULT, self.out / RESULT)
        shutil.rmtree(self.work, ignore_errors=True)

    def _tidy(self) -> None:
        """Remove the created folders if no unit has been completed."""
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
                f"{what} with {'; '.join(differing)}; valid: the same settings, or a new folder"
            )

    def _save(self) -> None:
        _write_json(self.work / _STATE, self._state)


def _text(value: object) -> str:
    return "none" if value is None else str(value)


def _stamp(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
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
        raise DataError(f"{path} cannot be read ({error}); valid: a new folder") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} was not written by data prepare; valid: a new folder")
    return content
