"""The folder of a data set that is being prepared, in which a kill at any moment does no harm.

``OUT/prepare.json`` holds the settings and a hash of the source: a call with others is refused. The
splits are written to ``OUT/train.partial`` and ``OUT/val.partial``, and their files to names that
end in ``.partial`` as well. What is complete is renamed, and kept by the next call.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ..errors import DataError
from ..sources import ImageFolder, Shards
from .images import Images

_RESULT = "prepare.json"
_PARTIAL = ".partial"
_SPLITS = ("val", "train")  # training images last: nothing can be trained on before all is there
_LAYOUT = 1


class Preparation:
    """The state of a data set that is being prepared or finished, kept in ``prepare.json``.

    All methods raise :class:`DataError` if ``out`` holds something else, or a data set with other
    ``settings``, of other images or with a part missing.
    """

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self.out = out
        self._state: dict[str, Any] = {"settings": {"layout": _LAYOUT, **settings}, "source": {}}
        if (out / _RESULT).exists():
            found = _read_json(out / _RESULT)
            theirs, ours = found["settings"], self._state["settings"]
            differing = [
                f"{name}={_text(theirs.get(name))}, not {_text(ours.get(name))}"
                for name in {**theirs, **ours}
                if theirs.get(name) != ours.get(name)
            ]
            if differing:
                raise DataError(
                    f"{out} was prepared with {'; '.join(differing)}; valid: the same settings, or "
                    "a new folder"
                )
            self._state = found
        elif set(os.listdir(out)) - {_RESULT + _PARTIAL}:
            raise DataError(f"{out} is not empty and is not this data set; valid: a new folder")

    def folder(self, split: str) -> Path | None:
        """Return the folder in which a split is written; None if the split is complete."""
        return None if (self.out / split).exists() else self.out / f"{split}{_PARTIAL}"

    def finished_counts(self) -> dict[str, int] | None:
        """Return the number of images by split if the data set is complete, None if unfinished."""
        if "splits" not in self._state:
            return None
        counts: dict[str, int] = {}
        form, classes = self._state["settings"]["format"], None
        try:
            for split, expected in self._state["splits"].items():
                source: ImageFolder | Shards
                if form == "folder":
                    source = ImageFolder(self.out, split, classes)
                else:
                    source = Shards(self.out, split, format=form)
                counts[split], classes = len(source), source.classes
                if len(source) != (wanted := expected["images"]):
                    where = self.out / split
                    raise DataError(f"{where} has {len(source):,} images, not {wanted:,}")
        except DataError as error:
            raise DataError(f"{error}: remove {self.out} to write it again") from error
        return counts

    def check_source(self, splits: Sequence[Images]) -> None:
        """Check that the images to be written are those of earlier calls."""
        verb = "written" if "splits" in self._state else "started"
        for images in splits:
            found = images.fingerprint()
            if self._state["source"].setdefault(images.split, found) != found:
                raise DataError(
                    f"{self.out} was {verb} from other images than {images.split} has now; "
                    f"valid: a new folder, or remove {self.out}"
                )

    def begin(self, splits: Sequence[Images]) -> None:
        """Record the source, make the folders and remove what an earlier call left partial."""
        self.check_source(splits)
        self._save()
        for images in splits:
            if folder := self.folder(images.split):
                folder.mkdir(exist_ok=True)
                for partial in folder.glob(f"*{_PARTIAL}*"):
                    partial.unlink()

    def finish(self, splits: Sequence[Images]) -> None:
        """Rename the complete splits, and record their numbers of images."""
        os.sync()  # once for all files: there may be a million
        for split in _SPLITS:
            if (self.out / f"{split}{_PARTIAL}").exists():
                os.rename(self.out / f"{split}{_PARTIAL}", self.out / split)
        self._state["splits"] = {images.split: {"images": len(images)} for images in splits}
        self._save()

    def discard(self) -> bool:
        """Remove an unfinished data set without a complete file; return whether that was done."""
        partial = [self.out / f"{split}{_PARTIAL}" for split in _SPLITS]
        paths = (path for folder in partial for path in folder.rglob("*"))
        complete = any(path.is_file() and not path.name.endswith(_PARTIAL) for path in paths)
        if complete or any(self.folder(s) is None for s in _SPLITS):
            return False
        for folder in partial:
            shutil.rmtree(folder, ignore_errors=True)
        for name in (_RESULT, _RESULT + _PARTIAL):
            (self.out / name).unlink(missing_ok=True)
        return True

    def _save(self) -> None:
        with completed(self.out / _RESULT) as file:
            file.write(f"{json.dumps(self._state, indent=2)}\n".encode())


@contextmanager
def preparing(out: str | os.PathLike[str], settings: dict[str, Any]) -> Iterator[Preparation]:
    """Create or continue the folder of a data set, locked by one process at a time.

    If the block fails before any file is complete, what was made is removed.
    """
    folder = Path(out).absolute()
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            preparation = Preparation(folder, settings)
            try:
                yield preparation
            except BaseException:
                with suppress(OSError):
                    if preparation.discard():
                        for path in missing:
                            path.rmdir()
                raise
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}") from error


@contextmanager
def completed(path: Path) -> Iterator[IO[bytes]]:
    """Open ``path.partial``, which becomes ``path`` once the block has ended and all is on disk."""
    partial = path.with_name(path.name + _PARTIAL)
    with partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder; the lock is released when the process ends for whatever reason."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder} is being written by another process") from None
        except OSError:
            pass  # this file system has no locks
        yield
    finally:
        os.close(descriptor)


def _text(value: object) -> str:
    return "none" if value is None else str(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        if isinstance(content["settings"], dict) and isinstance(content["source"], dict):
            return dict(content)
    except (ValueError, LookupError, TypeError):
        pass
    raise DataError(f"{path} was not written by data prepare; valid: a new folder")
