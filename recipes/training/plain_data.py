"""Reading the tensors of a checkpoint without running code from it.

torch.distributed.checkpoint unpickles a checkpoint's index and whatever is not a tensor, and a
pickle may run any command. The reader and the planner here load plain data only: tensors, numbers,
strings, containers, and the classes of the index.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePath
from traceback import format_exception_only
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

_INDEX = ".metadata"
_OF_METADATA = "torch.distributed.checkpoint.metadata"
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
#: The classes and functions that an index may name, by module.
_ALLOWED: dict[str, set[str]] = {
    _OF_METADATA: {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {*_PATHS},
    "pathlib._local": {*_PATHS},
}


class NotPlainError(ValueError):
    """Raised where a checkpoint holds something else than plain data."""


class PlainReader(dcp.FileSystemReader):
    """Reads a checkpoint folder whose index holds nothing but the classes of an index.

    Raises:
        NotPlainError: The index names another class or function, or a file outside the folder.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index."""
        with (Path(self.path) / _INDEX).open("rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise NotPlainError(f"{_INDEX} holds a {type(found).__name__}, not an index")
        for stored in (found.storage_data or {}).values():
            if not _is_file_name(stored.relative_path):
                raise NotPlainError(f"{_INDEX} names the file {stored.relative_path!r}")
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = StorageMeta()
        cast(StorageMeta, found.storage_meta).load_id = self.load_id
        return found


class PlainPlanner(dcp.DefaultLoadPlanner):
    """Loads what is not a tensor only if it is plain data.

    Raises:
        NotPlainError: It is not.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an item that is not a tensor."""
        try:
            content = torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            raise NotPlainError(
                f"{read_item.dest_index.fqn} holds an object that is not plain data"
            ) from None
        # torch's planner unpickles without a check: give it what this check has let through.
        checked = io.BytesIO()
        torch.save(content, checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)


def load(tensors: dict[str, Any], folder: Path) -> None:
    """Load a checkpoint into ``tensors``, in place, as ``torch.distributed.checkpoint.load``.

    Raises:
        CheckpointException: A file is missing, damaged or not plain data.
        NotPlainError: The index is not.
    """
    reader = PlainReader(folder)
    try:
        reader.read_metadata()  # as torch words an error in it at length
    except NotPlainError:
        raise
    except Exception:
        pass  # torch raises it again, on all ranks
    dcp.load(tensors, storage_reader=reader, planner=PlainPlanner())


def reason(error: BaseException) -> str:
    """Say in one line why a checkpoint could not be loaded, without torch's advice to trust it."""
    if isinstance(error, CheckpointException):  # which gathers the errors of all ranks
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, NotPlainError):
        return str(error)
    if isinstance(error, pickle.UnpicklingError):
        return "a tensor is stored with something that is not plain data"
    return format_exception_only(error)[0].splitlines()[0]


def check_plain(content: Any) -> None:
    """Check that :func:`load` would read ``content``, which is no tensor, back.

    Raises:
        NotPlainError: It would not; the message names the class.
    """
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # of any kind: objects may refuse to be pickled
        raise NotPlainError(_odd(content) or type(content).__name__) from None


def _odd(content: Any) -> str | None:
    """The class of the first object that is not plain data."""
    if isinstance(content, dict):
        content = [*content.keys(), *content.values()]
    if isinstance(content, list | tuple):
        return next((found for part in content if (found := _odd(part))), None)
    plain = content is None or isinstance(content, int | float | complex | str | bytes | Tensor)
    return None if plain else type(content).__qualname__


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in _ALLOWED.get(module, ()):
            raise NotPlainError(f"{_INDEX} names {module}.{name}, which is no part of an index")
        return super().find_class(module, name)


def _is_file_name(name: object) -> bool:
    """Whether a name is that of a file in the folder itself."""
    return isinstance(name, str) and name not in ("", ".", "..") and PurePath(name).name == name
