"""Reading the tensors of a checkpoint without running code from it.

torch.distributed.checkpoint unpickles a checkpoint's index and whatever is not a tensor, and a
pickle may run any command. The reader and the planner here load plain data only: tensors, numbers,
strings, containers, and the classes of the index.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from enum import Enum
from pathlib import Path, PurePath
from traceback import format_exception_only
from typing import Any, ClassVar, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import set_element
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
        name = read_item.dest_index.fqn
        try:
            content = torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            raise NotPlainError(f"{name} holds an object that is not plain data") from None
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], content)
        else:
            self.state_dict[name] = content


def load(tensors: dict[str, Any], folder: Path) -> None:
    """Load a checkpoint into ``tensors``, in place, as ``torch.distributed.checkpoint.load``.

    Each process reads what it needs, without collectives.

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
        pass  # torch raises it again
    dcp.load(tensors, storage_reader=reader, planner=PlainPlanner(), no_dist=True)


def reason(error: BaseException) -> str:
    """Say in one line why a checkpoint could not be loaded, without torch's advice to trust it."""
    if isinstance(error, CheckpointException):  # which gathers the errors of all ranks
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, NotPlainError):
        return str(error)
    if (behind := storage_error(error)) and behind.strerror:
        return behind.strerror
    if isinstance(error, pickle.UnpicklingError):
        return "a tensor is stored with something that is not plain data"
    return format_exception_only(error)[0].splitlines()[0]


def is_of_storage(error: CheckpointException) -> bool:
    """Whether all errors behind this are of the disk or its file system."""
    return all(
        storage_error(cause) or "inline_container" in str(cause)  # torch's, of what it writes
        for cause, _ in error.failures.values()
    )


def storage_error(error: BaseException | None) -> OSError | None:
    """The OSError behind an error, such as one of torch.save, if there is one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


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
    if type(content) in (dict, OrderedDict):
        content = [*content.keys(), *content.values()]
    if type(content) in (list, tuple, set):
        return next((found for part in content if (found := _odd(part))), None)
    plain = (int, float, complex, bool, str, bytes, type(None))
    is_plain = type(content) in plain or isinstance(content, Tensor)
    return None if is_plain else type(content).__qualname__


#: Python's own, of which the stubs know no more than of the one in C.
_PythonUnpickler: Any = pickle._Unpickler


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    """Knows the classes of an index, and sets no attributes of them, as the one in C would."""

    dispatch: ClassVar = dict(_PythonUnpickler.dispatch)

    def load_build(self) -> None:
        """Set the state of an object: of an instance only, for a class is every module's."""
        target = self.stack[-2]
        if isinstance(target, type) or callable(target) or isinstance(target, Enum):
            raise NotPlainError(f"{_INDEX} sets attributes of {target!r}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function that an index may name."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _path_text
        if name not in _ALLOWED.get(module, ()):
            raise NotPlainError(f"{_INDEX} names {module}.{name}, which is no part of an index")
        return super().find_class(module, name)


def _path_text(*parts: object) -> str:
    """In place of a path, which is not used: where the checkpoint was written."""
    return "/".join(map(str, parts))


def _is_file_name(name: object) -> bool:
    """Whether a name is that of a file in the folder itself."""
    return isinstance(name, str) and name not in ("", ".", "..") and PurePath(name).name == name
