"""Arrays of a .npz file that may be hostile: what it claims is checked before memory is allocated.

A few kilobytes can claim any number of members, of any size (a "zip bomb").
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

#: Most bytes of the arrays in all: the index of ImageNet-21k, of 14 million images, has 0.8 GB.
MOST_BYTES = 2**30
_MOST_MEMBERS, _MOST_DIRECTORY_BYTES = 64, 2**16
# Signature, numbers of disks, members here and in all, size and offset of the directory, comment.
_END = struct.Struct("<4s4H2LH")
_LOCATOR_OF_ZIP64, _LOCATOR_BYTES = b"PK\x06\x07", 20


def load_arrays(content: bytes) -> dict[str, NDArray[Any]]:
    """Read a .npz file of plain arrays with at most one axis and :data:`MOST_BYTES` in all."""
    _check_directory(content)
    found = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        stated = sum(member.file_size for member in archive.infolist())
        if stated > MOST_BYTES:
            raise ValueError(f"it unpacks to {stated:,} bytes; valid: at most {MOST_BYTES:,}")
        for member in archive.infolist():
            with archive.open(member) as file:  # which yields file_size bytes at most
                if npy.read_magic(file) != (1, 0):
                    raise ValueError(f"{member.filename} is not an array of NumPy's format 1.0")
                shape, _, dtype = npy.read_array_header_1_0(file)
                size = math.prod(shape) * dtype.itemsize
                if dtype.hasobject or len(shape) > 1 or size > member.file_size:
                    raise ValueError(f"{member.filename} has {shape} of {dtype}, or less")
                array = np.frombuffer(file.read(size), dtype).reshape(shape)
                found[member.filename.removesuffix(".npy")] = array
    return found


def _check_directory(content: bytes) -> None:
    """Check the size of the zip's directory, for each entry of which zipfile makes an object."""
    end = content[-_END.size :]
    if len(end) == _END.size:
        signature, *_, members, directory, _, comment = _END.unpack(end)
        before = content[-_END.size - _LOCATOR_BYTES : -_END.size]
        if (
            signature == b"PK\x05\x06"
            and not comment
            and members <= _MOST_MEMBERS
            and directory <= _MOST_DIRECTORY_BYTES
            and not before.startswith(_LOCATOR_OF_ZIP64)
        ):
            return
    raise ValueError("it is not a .npz file of a few arrays")
