"""Reading the images of a batch, and the handling of images that cannot be used.

With ``on_error="stop"`` the loader raises an error with the name of an image that cannot be used.
With ``"skip"``, training substitutes the next image of the source, at the same position in the
stream and with the same random numbers, so that batches stay full. Evaluation leaves the image out,
since a substitute would be counted twice.

That an image cannot be decoded is a property of the image: it is not read again, and its substitute
depends on the data alone. That it cannot be read is one of the moment, whatever the error (too many
open files, a disk or server that fails for a while): it is read again after a wait, and then in the
next epoch or evaluation.

With ``verify="strict"`` a damaged image (:mod:`~largebatch.pipeline.decode.verify`) cannot be used
either. The bytes are verified as read, so that the images used do not depend on the backend. An
image is verified when it is first read; after that its bytes are compared by their CRC-32.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..sources import Encoded, ImageSource
from .batch import Request
from .crops import Crop, Transform, evaluation_crop, training_crop
from .header import END_OF_IMAGE, image_size, needs_reference
from .pillow import as_png, decode
from .segments import is_jpeg
from .verify import verify as verify_image

_THREADS = 8
#: Waits before an image that cannot be read is read again, in seconds.
_WAITS = (0.1, 0.4)
#: Number of images in a row, about a shard, that may be unreadable before storage is at fault.
_MOST_UNREAD = 2000
#: Pixels of a resized image: of 256 pixels on the shorter side, with a ratio of 1,024.
_MOST_PIXELS = 2**26


class Reader:
    """Reads images and makes the requests for a decoding backend, with arguments of the loader."""

    def __init__(
        self,
        source: ImageSource,
        transform: Transform,
        *,
        training: bool,
        on_error: str,
        verify: str = "decode",
    ) -> None:
        self.source = source
        self._transform = transform
        self._training = training
        self._on_error = on_error
        self._lock = threading.Lock()
        self._converted: set[int] = set()
        # The CRC-32 of each image that was verified, else -1; None unless images are verified.
        self._verified = np.full(len(source), -1, np.int64) if verify == "strict" else None
        self._undecodable: set[int] = set()
        self._unread: set[int] = set()  # in this epoch
        self._unread_in_a_row = 0
        self._faults: dict[int, str] = {}  # of images that were unusable so far, by index
        self.read_seconds = 0.0  # on several threads at once
        self.images_read = 0

    def request(
        self, wanted: NDArray[np.int64], uniforms: NDArray[np.float64] | None, image_size: int
    ) -> Request:
        """Read the images of the indices ``wanted``, compute their crops and return the request."""
        with self._lock:
            indices, contents, sizes = self._read(wanted)
        return Request(
            indices=indices,
            labels=self.source.labels[indices],
            contents=contents,
            crop=self.crop(sizes, uniforms, image_size),
            image_size=image_size,
            wanted=wanted,
            uniforms=uniforms,
        )

    def crop(
        self, sizes: NDArray[np.int64], uniforms: NDArray[np.float64] | None, image_size: int
    ) -> Crop:
        """Return the crops of images of ``sizes``, shape ``[n, 2]``."""
        if uniforms is None:
            return evaluation_crop(sizes, self._transform)
        return training_crop(sizes, uniforms, self._transform, image_size)

    def begin_epoch(self) -> None:
        """Read images again that could not be read in the epoch or evaluation before."""
        with self._lock:
            self._unread.clear()

    @property
    def left_out(self) -> int:
        """Number of images that this epoch or evaluation cannot use."""
        return len(self._undecodable | self._unread)

    @property
    def skipped(self) -> dict[str, str]:
        """The fault of each unusable image found so far, by the image's name."""
        found = dict(self._faults)  # a copy: another thread adds to it
        return {self.source.name(index): what for index, what in found.items()}

    def remake(
        self,
        requests: Sequence[Request],
        error: Exception,
        decodes: Callable[[Encoded], bool] = lambda content: True,
    ) -> list[Request]:
        """Make requests again after the backend failed to decode one of them.

        An image that Pillow cannot decode is unusable. An image that Pillow can decode and the
        backend cannot (``decodes``) is converted to PNG by Pillow from now on.
        """
        pairs = [pair for r in requests for pair in zip(r.indices, r.contents, strict=True)]
        found = False
        for index, content in pairs:
            try:
                decode(content)
            except ValueError as wrong:
                found = True
                self._skip(int(index), f"cannot be decoded: {wrong}", self._undecodable)
        if not found:
            undecoded = {int(i): content for i, content in pairs if not decodes(content)}
            if not undecoded or not all(decodes(as_png(c)) for c in undecoded.values()):
                raise DataError(f"a batch cannot be decoded: {error}") from error
            self._converted |= undecoded.keys()
        again = [self.request(r.wanted, r.uniforms, r.image_size) for r in requests]
        return [request for request in again if len(request.indices)]

    def _read(
        self, wanted: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], list[Encoded], NDArray[np.int64]]:
        """Return indices, bytes and sizes of the images ``wanted`` or of their substitutes."""
        indices = wanted.copy()
        contents: list[Encoded | None] = [None] * len(wanted)
        sizes = np.ones((len(wanted), 2), dtype=np.int64)
        places = np.arange(len(wanted))
        while places.size:
            places = self._substitute(indices, places)
            failed = []
            found = self._verify_in_threads(indices[places], self._read_again(indices[places]))
            for place, content in zip(places, found, strict=True):
                index = int(indices[place])
                if isinstance(content, DataError):
                    self._count_unread(index, content)
                else:
                    self._unread_in_a_row = 0
                    try:
                        contents[place], sizes[place] = self._accept(index, content)
                        continue
                    except ValueError as error:
                        self._skip(index, str(error), self._undecodable)
                failed.append(place)
            places = np.array(failed, dtype=np.int64)
        kept = [place for place, content in enumerate(contents) if content is not None]
        usable = [content for content in contents if content is not None]
        return indices[kept], usable, sizes[kept]

    def _read_again(self, indices: NDArray[np.int64]) -> list[Encoded | DataError]:
        """Read images, those that cannot be read several times."""
        start = time.perf_counter()
        found = self._read_in_threads(indices)
        for wait in _WAITS:
            failed = [at for at, content in enumerate(found) if isinstance(content, DataError)]
            if not failed:
                break
            time.sleep(wait)
            for at, content in zip(failed, self._read_in_threads(indices[failed]), strict=True):
                found[at] = content
        self.read_seconds += time.perf_counter() - start
        self.images_read += len(indices)
        return found

    def _count_unread(self, index: int, error: DataError) -> None:
        what = str(error).removeprefix(self.source.name(index)).strip()
        self._skip(index, what, self._unread)
        self._unread_in_a_row += 1
        if self._unread_in_a_row == _MOST_UNREAD:
            count = f"{_MOST_UNREAD - 1:,}"
            raise DataError(f"{self.source.name(index)} {what}; nor can the {count} before it")

    def _read_in_threads(self, indices: NDArray[np.int64]) -> list[Encoded | DataError]:
        """Read on several threads, since disks and servers serve many requests at once."""
        pieces = np.array_split(indices, max(1, min(_THREADS, len(indices))))
        parts = self._threads.map(self.source.read, pieces)
        return [content for part in parts for content in part]

    def _verify_in_threads(
        self, indices: NDArray[np.int64], contents: list[Encoded | DataError]
    ) -> Sequence[Encoded | DataError | ValueError]:
        """Replace the damaged images by errors, if images are verified."""
        verified = self._verified
        if verified is None:
            return contents

        def check(index: int, content: Encoded | DataError) -> Encoded | DataError | ValueError:
            if isinstance(content, DataError):
                return content
            checksum = zlib.crc32(content.data)
            if verified[index] != checksum:
                try:
                    verify_image(content)
                except ValueError as error:
                    return error
                verified[index] = checksum
            return content

        return list(self._threads.map(check, indices.tolist(), contents))

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, thread_name_prefix="largebatch-read")

    def _substitute(
        self, indices: NDArray[np.int64], places: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Substitute known unusable images in ``indices``; return the places to read."""
        unusable = self._undecodable | self._unread
        if not self._training:
            return places[[index not in unusable for index in indices[places].tolist()]]
        if len(unusable) == len(self.source):
            example = " ".join(next(iter(self.skipped.items())))
            raise DataError(f"none of the {len(self.source)} images can be used: {example}")
        for place in places:
            while int(indices[place]) in unusable:
                indices[place] = (indices[place] + 1) % len(self.source)
        return places

    def _accept(self, index: int, content: Encoded | ValueError) -> tuple[Encoded, tuple[int, int]]:
        """Return the bytes to decode, and width and height; ValueError says why there are none."""
        if isinstance(content, ValueError):
            raise content
        try:
            if index in self._converted or needs_reference(content):
                content = as_png(content)
            size = image_size(content)
            # Some cameras write a few bytes after the end.
            if is_jpeg(content) and END_OF_IMAGE not in content[-64:].tobytes():
                # A decoder of a region would not notice that rows below the region are missing.
                decode(content)
        except ValueError as error:
            raise ValueError(f"cannot be decoded: {error}") from error
        if not self._training:  # crops of training are resized to a fixed size
            width, height = evaluation_crop(np.array([size]), self._transform).resized[0]
            if width * height > _MOST_PIXELS:
                raise ValueError(
                    f"has {size[0]} x {size[1]} pixels, which evaluation would resize to "
                    f"{width:,} x {height:,}, more than {_MOST_PIXELS:,}"
                )
        return content, size

    def _skip(self, index: int, what: str, to: set[int]) -> None:
        """Add an image to those that cannot be decoded, or to those that were not read."""
        if self._on_error == "stop":
            advice = (
                "largebatch data check lists all such images, data.on_error=skip continues without "
                "them"
                if to is self._undecodable
                else "the image may be sound: resume when it can be read, or data.on_error=skip "
                "continues without it for this epoch"
            )
            raise DataError(f"{self.source.name(index)} {what}; {advice}")
        to.add(index)
        self._faults[index] = what
