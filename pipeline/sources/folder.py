"""Images in the ImageNet folder layout."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, printable
from .base import EXTENSIONS, Encoded, ImageSource, is_hidden, is_image_name, unread_extension
from .faults import HIDDEN, NESTED, OTHER, STOPS, STRAYS, Fault, OnFault, no_class_of, refuse
from .shards.index import INDEX_FILE, Index
from .storage.local import MOST_IMAGE_BYTES, open_regular, read_exactly, reason, too_large


class ImageFolder(ImageSource):
    """Images in the ImageNet folder layout: ``root/split/class/image``.

    Classes are numbered in the order of their names, and images are sorted by class and name, so
    that every rank and every run numbers them in the same way. Hidden files and folders, and those
    of operating systems and network storage, are neither classes nor images. Names of classes and
    images have escapes for what cannot be printed (:func:`~largebatch.pipeline.errors.printable`).

    Args:
        root: Folder of the data set.
        split: ``"train"`` or ``"val"``.
        classes: Class names by number, to number them as another split does; by default the sorted
            names of the class folders.
        on_fault: Called with each fault (:mod:`~largebatch.pipeline.sources.faults`); the default
            raises for those that stop training. If it does not raise, a class that ``classes``
            does not have is added at their end.

    Raises:
        DataError: The folder is missing or holds shards, or ``on_fault`` refuses a fault: a folder
            cannot be read, a class folder is empty, a link leads nowhere, or a class is unknown.
    """

    kind = "folder"

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str = "train",
        classes: tuple[str, ...] | None = None,
        on_fault: OnFault = refuse,
    ) -> None:
        self.folder = Path(root) / split
        self._prefix = f"{self.folder}/"
        self._on_fault = on_fault
        found = self._class_folders()
        names = dict.fromkeys(map(printable, found))
        if len(names) < len(found):
            self._fault("", "has class folders whose names differ by escapes only: rename one")
        known = classes or ()
        for name in found if known else ():
            if printable(name) not in known:
                self._fault(name, no_class_of(known))
        self.classes = (*known, *(name for name in names if name not in known))
        numbers = {name: number for number, name in enumerate(self.classes)}
        self._names: list[str] = []
        labels: list[int] = []
        for name in found:
            images = self._images(name)
            self._names += [f"{name}/{image}" for image in images]
            labels += [numbers[printable(name)]] * len(images)
        self.labels: NDArray[np.int64] = np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        return printable(self.path(index))

    def path(self, index: int) -> str:
        """Return the path of an image, to open it."""
        return f"{self._prefix}{self._names[index]}"

    def read(self, indices: NDArray[np.int64]) -> list[Encoded | DataError]:
        return [self._read(self.path(index)) for index in indices]

    def _read(self, path: str) -> Encoded | DataError:
        try:
            # System calls: opening a Python file object takes several times as long.
            file, size = open_regular(path)
            try:
                if size > MOST_IMAGE_BYTES:
                    raise OSError(too_large(f"{size:,}", MOST_IMAGE_BYTES))
                return read_exactly(file, 0, size)
            finally:
                os.close(file)
        except OSError as error:
            return DataError(f"{printable(path)} cannot be read: {reason(error)}")

    @cached_property
    def fingerprint(self) -> str:
        content = "\n".join([*self.classes, "", *self._names])
        return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def _class_folders(self) -> list[str]:
        """Return the names of the class folders, sorted."""
        if not os.path.isdir(self.folder):
            raise DataError(
                f"no data folder {self.folder}; valid: one folder of images per class, "
                f"{self.folder}/<class>/<image>.jpeg"
            )
        found, strays = [], 0
        for entry in self._entries("") or ():
            if is_hidden(entry.name):
                kind = HIDDEN if _holds_images(entry) else OTHER
                self._fault(entry.name, "is a hidden or system file or folder, and no class", kind)
            elif error := _dangling(entry):
                what = f"cannot be read: {error}; a class may be missing: mend or remove the link"
                self._fault(entry.name, what)
            elif os.path.isdir(entry):
                found.append(entry.name)
            elif not is_image_name(entry.name):
                self._not_image(entry.name)
            else:
                strays += 1
                self._fault(entry.name, "is in no class folder", STRAYS)
        if not found:
            index = self.folder / INDEX_FILE
            if index.is_file():
                form = Index.load(index.read_bytes(), str(index)).format
                what = f"holds shards, not class folders; valid: data.source={form}"
                raise DataError(f"{self.folder} {what}")
            images = f", but {strays:,} images" if strays else ""
            valid = f"{self.folder}/<class>/<image>"
            self._fault("", f"has no class folders{images}; valid: {valid}")
        return found

    def _images(self, name: str) -> list[str]:
        """Return the names of the images in a class folder, sorted."""
        entries = self._entries(name)
        if entries is None:
            return []
        images = [entry.name for entry in entries if is_image_name(entry.name)]
        unread = nested = 0
        others = (entry for entry in entries if not is_image_name(entry.name))
        for entry in others if len(images) < len(entries) else ():
            path = f"{name}/{entry.name}"
            if is_hidden(entry.name) or not os.path.isdir(entry):
                unread += self._not_image(path)
                continue
            inside = sum(map(is_image_name, _files_below(self._prefix + path)))
            what = f"is a folder inside a class, with {inside:,} images"
            self._fault(path, what, NESTED if inside else OTHER, inside)
            nested += inside
        if not images:
            also = f", but {unread:,} files that are not read" if unread else ""
            also += f", but {nested:,} in folders inside it" if nested else ""
            self._fault(
                name,
                f"has no images ({', '.join(EXTENSIONS)}){also}: add images or remove the folder",
            )
        return images

    def _not_image(self, path: str) -> bool:
        """Report a file without the name of an image; return whether it may be an image."""
        extension = unread_extension(path.rpartition("/")[2])
        valid = f"is not read: {extension} is none of {', '.join(EXTENSIONS)}"
        what, kind = (valid, f"{extension} files") if extension else ("is not an image", OTHER)
        self._fault(path, what, kind)
        return bool(extension)

    def _entries(self, name: str) -> list[os.DirEntry[str]] | None:
        """Return the entries of a folder, sorted by name; None if it cannot be read."""
        try:
            with os.scandir(self.folder / name) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            self._fault(name, f"cannot be read: {error.strerror}")
            return None

    def _fault(self, name: str, what: str, kind: str = STOPS, count: int = 1) -> None:
        self._on_fault(Fault(f"{self._prefix}{name}".rstrip("/"), what, kind, count))


def _holds_images(folder: os.DirEntry[str]) -> bool:
    try:
        return any(map(is_image_name, os.listdir(folder)))
    except OSError:  # it is no folder, or is that of another user
        return False


def _dangling(entry: os.DirEntry[str]) -> str:
    """Return why what a link leads to cannot be read; empty if it can."""
    try:
        if entry.is_symlink():
            entry.stat()
    except OSError as error:
        return str(error.strerror)
    return ""


def _files_below(folder: str) -> Iterator[str]:
    """Yield the names of the files below a folder, except for hidden ones."""
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not is_hidden(name)]
        yield from files
