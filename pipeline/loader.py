"""The loader: micro-batches for one rank, made ahead of time, resumable at any of them."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from .backend_dali import DaliBackend
from .backend_torchvision import TorchvisionBackend
from .batch import Batch, Request, ahead
from .errors import DataError
from .geometry import Transform, evaluation_cut, training_cut
from .order import Stream, evaluation_share
from .sources import ImageFolder, Source, Synthetic

BACKENDS = ("dali-gpu", "dali-cpu", "torchvision")

_VERSION = 1
_SYNTHETIC_BATCHES = 4


class Loader:
    """Iterates the :class:`Batch` es of one rank.

    In training it goes on for ``epochs`` epochs (for ever without), in the global order of
    :mod:`~largebatch.pipeline.order`: micro-batch t of rank r is images ``(t W + r) m`` to
    ``(t W + r + 1) m`` of the stream, with m the micro-batch and W the number of ranks, and
    ``batch_size / (m W)`` micro-batches make up a global batch. In evaluation it goes once over
    this rank's share of the images, each of which is in exactly one rank's share, and the last
    batch may be smaller.

    Args:
        source: the images.
        transform: what is done to them.
        batch_size: the global batch; a multiple of ``micro_batch_size * world_size``.
        micro_batch_size: images per batch of this rank; by default ``batch_size / world_size``.
        training: shuffle and augment; False evaluates.
        epochs: how long to train, rounded to whole global batches; None never ends.
        seed: of the order and the augmentation, >= 0.
        rank: this rank, of all ranks of the job.
        world_size: number of all ranks of the job.
        device: where batches are wanted.
        backend: one of ``BACKENDS`` or ``"auto"``: DALI if it is installed (on the GPU if
            ``device`` is one), else torchvision. The attribute ``backend`` says which it is.
        threads: that decode, at least 1; by default this rank's share of the machine's cores.
        prefetch: batches made ahead.

    Attributes:
        wait_seconds: how long iterations have waited for a batch so far.

    Raises:
        DataError: the batch does not divide, or the back end is not installed.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        *,
        batch_size: int,
        micro_batch_size: int | None = None,
        training: bool = True,
        epochs: float | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        backend: str = "auto",
        threads: int | None = None,
        prefetch: int = 2,
    ) -> None:
        if micro_batch_size is None:
            micro_batch_size = max(1, batch_size // world_size)
        if training and batch_size % (micro_batch_size * world_size):
            raise DataError(
                f"batch_size {batch_size} is not a multiple of micro_batch_size "
                f"{micro_batch_size} x {world_size} ranks"
            )
        self.source = source
        self.transform = transform
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.training = training
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.wait_seconds = 0.0
        self.steps_per_epoch = len(source) / batch_size
        self._end = None if epochs is None else round(epochs * self.steps_per_epoch) * batch_size
        self._position = 0
        self._prefetch = prefetch
        self.backend, self._make = self._choose(backend, threads or _share_of_cores())

    def __iter__(self) -> Iterator[Batch]:
        batches = self._make()
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.wait_seconds += time.perf_counter() - start
            if batch is None:
                return
            if self.training:
                self._position += self.micro_batch_size * self.world_size
            yield batch

    @property
    def epoch(self) -> float:
        """How many epochs of training have been given out, on all ranks together."""
        return self._position / len(self.source)

    def state_dict(self) -> dict[str, Any]:
        """Where training stands: after the last batch that was given out, on all ranks alike."""
        return {"position": self._position, "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any], *, reshard: bool = False) -> None:
        """Go on from where ``state`` was taken, with the same images and crops as if unbroken.

        Args:
            state: from :meth:`state_dict`.
            reshard: take a state of another number of ranks or batch size, and go on with the
                images of the epoch that were not yet given out.

        Raises:
            DataError: the state is of other data, another seed or (without ``reshard``) other
                ranks or batches; the message names the difference.
        """
        ours, theirs = self._fingerprint(), state["fingerprint"]
        for key, value in ours.items():
            if theirs.get(key) == value:
                continue
            difference = f"the input was saved with {key} {theirs.get(key)}, now it is {value}"
            if key not in ("world_size", "batch_size", "micro_batch_size"):
                raise DataError(f"{difference}: the order of images would not be the same")
            if not reshard:
                raise DataError(
                    f"{difference}; resume.reshard=true goes on with the images not yet seen"
                )
        self._position = state["position"]

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "images": len(self.source),
            "files": self.source.fingerprint,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "micro_batch_size": self.micro_batch_size,
            "world_size": self.world_size,
        }

    def _choose(self, backend: str, threads: int) -> tuple[str, Callable[[], Iterator[Batch]]]:
        if isinstance(self.source, Synthetic):
            return "synthetic", self._synthetic
        source = self.source
        on_gpu = self.device.type == "cuda"
        if backend == "auto":
            dali = "dali-gpu" if on_gpu else "dali-cpu"
            backend = dali if _installed("nvidia.dali") else "torchvision"
        if backend not in BACKENDS:
            raise DataError(f"backend {backend!r} is not one of auto, {', '.join(BACKENDS)}")
        if backend == "dali-gpu" and not on_gpu:
            raise DataError(
                f"backend dali-gpu needs a CUDA device, not {self.device}; "
                "dali-cpu and torchvision do not"
            )
        module = "torchvision" if backend == "torchvision" else "nvidia.dali"
        if not _installed(module):
            package = "torchvision" if backend == "torchvision" else "largebatch[cuda13]"
            raise DataError(f"backend {backend} needs {module}: pip install '{package}'")
        make: Callable[[Iterator[Request]], Iterator[Batch]]
        if backend == "torchvision":
            make = TorchvisionBackend(
                source,
                self.transform,
                device=self.device,
                threads=threads,
                prefetch=self._prefetch,
            )
        else:
            make = DaliBackend(
                source,
                self.transform,
                max_batch=self.micro_batch_size,
                device=self.device,
                gpu=backend == "dali-gpu",
                threads=threads,
                prefetch=self._prefetch,
            )
        return backend, lambda: make(ahead(self._requests(source), self._prefetch))

    def _requests(self, source: ImageFolder) -> Iterator[Request]:
        stream = Stream(len(source), self.seed)
        for start, count in self._pieces():
            if self.training:
                indices, uniforms = stream.take(start, count)
                cut = training_cut(source.sizes(indices), uniforms, self.transform)
            else:
                indices = np.arange(start, start + count)
                cut = evaluation_cut(source.sizes(indices), self.transform)
            yield Request(indices, source.labels[indices], cut)

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Start and length of each micro-batch of this rank: in the stream, or in the images."""
        size = self.micro_batch_size
        if not self.training:
            share = evaluation_share(len(self.source), self.rank, self.world_size)
            for start in range(share.start, share.stop, size):
                yield start, min(size, share.stop - start)
            return
        position = self._position
        while self._end is None or position < self._end:
            yield position + self.rank * size, size
            position += self.world_size * size

    def _synthetic(self) -> Iterator[Batch]:
        """A few random batches over and over: no work, and the loss can still fall."""
        shape = (self.micro_batch_size, 3, self.transform.image_size, self.transform.image_size)
        pool: dict[int, Batch] = {}
        for start, count in self._pieces():
            key = start // self.micro_batch_size % _SYNTHETIC_BATCHES
            if key not in pool:
                seed = (_SYNTHETIC_BATCHES * self.seed + key) % 2**63
                generator = torch.Generator().manual_seed(seed)
                labels = torch.randint(len(self.source.classes), shape[:1], generator=generator)
                images = torch.randn(shape, generator=generator)
                pool[key] = Batch(images.to(self.device), labels.to(self.device))
            images, labels = pool[key]
            yield Batch(images[:count], labels[:count])


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def _share_of_cores() -> int:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks)
