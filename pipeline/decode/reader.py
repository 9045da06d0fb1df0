"""Reading the images of a batch, and what happens to those that cannot be used.

An image cannot be used if its file cannot be read, if it is not an image, or if it was cut short.
Training stops there with its name; or, where it is to be skipped, the next image of the source
stands in for it, at the same place with the same random numbers, so that batches stay full and
what stands in is a function of the data alone. Evaluation leaves it out: another in its place
would count twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..sources import Encoded, ImageSource
from .batch import Request
from .crops import Cut, Transform, evaluation_cut, training_cut
from .header import image_size, is_whole_jpeg
from .pillow import as_png, decode

#: What can be done about images that cannot be used.
ON_ERROR = ("stop", "skip")

_JPEG = b"\xff\xd8"
_THREADS = 8


class Reader:
    """Makes requests with the bytes of their images.

    Args:
        source: the images.
        transform: what is done to them.
        training: whether they are cut at random, and others stand in for those skipped.
        on_error: one of ``ON_ERROR``.

    Attributes:
        skipped: what is wrong with each image that was found and cannot be used, by number.
        read_seconds: for which it has read so far, on several threads at once.
        images: read so far.
    """

    def __init__(
        self, source: ImageSource, transform: Transform, *, training: bool, on_error: str
    ) -> None:
        self._source = source
        self._transform = transform
        self._training = training
        self._on_error = on_error
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._converted: set[int] = set()
        self.skipped: dict[int, str] = {}
        self.read_seconds = 0.0
        self.images = 0

    def request(
        self,
        wanted: NDArray[np.int64],
        uniforms: NDArray[np.float64] | None,
        image_size: int,
    ) -> Request:
        """Read images and find where they are cut.

        Args:
            wanted: their numbers, shape ``[n]``.
            uniforms: random numbers, ``[n, UNIFORMS]``; None in evaluation.
            image_size: pixels on each side.

        Raises:
            DataError: one cannot be used, and is not to be skipped.
        """
        with self._lock:
            indices, contents, sizes = self._read(wanted)
        return Request(
            indices=indices,
            labels=self._source.labels[indices],
            contents=contents,
            cut=self.cut(sizes, uniforms, image_size),
            image_size=image_size,
            wanted=wanted,
            uniforms=uniforms,
        )

    def cut(
        self, sizes: NDArray[np.int64], uniforms: NDArray[np.float64] | None, image_size: int
    ) -> Cut:
        """Where images of ``sizes``, shape ``[n, 2]``, are cut."""
        if uniforms is None:
            return evaluation_cut(sizes, self._transform)
        return training_cut(sizes, uniforms, self._transform, image_size)

    def named_skipped(self) -> dict[str, str]:
        """What is wrong with each image that cannot be used, by its name."""
        found = dict(self.skipped)  # another thread adds to it
        return {self._source.name(index): what for index, what in found.items()}

    def mend(
        self, requests: Sequence[Request], decodes: Callable[[Encoded], bool], error: Exception
    ) -> list[Request]:
        """Make requests anew, after one of them could not be decoded.

        What Pillow cannot decode cannot be used. What it can, but the back end cannot, goes
        through Pillow from now on.

        Args:
            requests: one of them failed.
            decodes: whether the back end can decode an image; asked only where Pillow can decode
                all of them.
            error: what the back end said.

        Raises:
            DataError: names the image that cannot be used, where it is not to be skipped; or no
                image is to blame.
        """
        pairs = [pair for r in requests for pair in zip(r.indices, r.contents, strict=True)]
        found = False
        for index, content in pairs:
            try:
                decode(content)
            except ValueError as wrong:
                found = True
                self._skip(int(index), f"cannot be decoded: {wrong}")
        if not found:
            undecoded = {int(i): content for i, content in pairs if not decodes(content)}
            if not undecoded or not all(decodes(as_png(c)) for c in undecoded.values()):
                raise DataError(f"a batch could not be made: {error}") from error
            self._converted |= undecoded.keys()
        again = [self.request(r.wanted, r.uniforms, r.image_size) for r in requests]
        return [request for request in again if len(request.indices)]

    def _read(
        self, wanted: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], list[Encoded], NDArray[np.int64]]:
        """Numbers, bytes and sizes of the images that ``wanted`` or those standing in for them."""
        indices = wanted.copy()
        contents: list[Encoded | None] = [None] * len(wanted)
        sizes = np.ones((len(wanted), 2), dtype=np.int64)
        places = np.arange(len(wanted))
        while places.size:
            if self.skipped:
                places = self._stand_in(indices, places)
            start = time.perf_counter()
            found = self._together(indices[places])
            self.read_seconds += time.perf_counter() - start
            self.images += len(places)
            failed = []
            for place, content in zip(places, found, strict=True):
                try:
                    contents[place], sizes[place] = self._accept(int(indices[place]), content)
                except ValueError as error:
                    self._skip(int(indices[place]), str(error))
                    failed.append(place)
            places = np.array(failed, dtype=np.int64)
        kept = [place for place, content in enumerate(contents) if content is not None]
        usable = [content for content in contents if content is not None]
        return indices[kept], usable, sizes[kept]

    def _together(self, indices: NDArray[np.int64]) -> list[Encoded | DataError]:
        """Read on several threads: a disk or a server answers many requests as fast as one."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="largebatch-read")
        pieces = np.array_split(indices, max(1, min(_THREADS, len(indices))))
        return [content for part in self._pool.map(self._source.read, pieces) for content in part]

    def _stand_in(self, indices: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Put others in the place of images that cannot be used; the places that are to be read."""
        if not self._training:
            return np.array([p for p in places if int(indices[p]) not in self.skipped], np.int64)
        if len(self.skipped) == len(self._source):
            some = next(iter(self.skipped))
            raise DataError(
                f"none of the {len(self._source)} images can be used: "
                f"{self._source.name(some)} {self.skipped[some]}"
            )
        for place in places:
            while int(indices[place]) in self.skipped:
                indices[place] = (indices[place] + 1) % len(self._source)
        return places

    def _accept(self, index: int, content: Encoded | DataError) -> tuple[Encoded, tuple[int, int]]:
        """The bytes to decode, and width and height.

        Raises:
            ValueError: says what is wrong with the image.
        """
        if isinstance(content, DataError):
            raise ValueError(str(content).removeprefix(self._source.name(index)).strip())
        if index in self._converted:
            content = as_png(content)
        try:
            size = image_size(content)
            if content[:2].tobytes() == _JPEG and not is_whole_jpeg(content):
                # Decoders of a region would not notice that what is below it is missing.
                decode(content)
        except ValueError as error:
            raise ValueError(f"cannot be decoded: {error}") from error
        return content, size

    def _skip(self, index: int, what: str) -> None:
        if self._on_error == "stop":
            raise DataError(
                f"{self._source.name(index)} {what}; largebatch data check finds all such images, "
                "data.on_error=skip goes on without them"
            )
        self.skipped[index] = what
