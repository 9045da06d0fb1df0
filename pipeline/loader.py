"""The loader: micro-batches for one rank, made ahead of time, resumable at any of them."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from .. import __version__
from .decode.batch import Batch, DecodedBatch, MemoryLayout, Request, prefetch
from .decode.crops import Transform
from .decode.dali import DaliBackend
from .decode.options import BACKENDS, ON_ERROR
from .decode.reader import Reader
from .decode.synthetic import SyntheticBackend
from .decode.torchvision import TorchvisionBackend
from .errors import DataError
from .fingerprint import ORDER_VERSION, changes, check
from .order import Stream, evaluation_share
from .sources import Source, Synthetic
from .stages import Phase, Stage, lay_out, phase_at, until

_PREFETCH = 2


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
        device: where batches are wanted; ``"cuda"`` is the current GPU.
        backend: one of ``BACKENDS`` or ``"auto"``: DALI if it is installed (on the GPU if
            ``device`` is one), else torchvision. The attribute ``backend`` says which it is.
        threads: that decode, at least 1; by default this rank's share of the machine's cores.
        prefetch: batches made ahead; by default 2.
        dtype: of images, FP32 or FP16.
        memory_format: of images, ``torch.contiguous_format`` or ``torch.channels_last``.
        on_error: what happens at an image that cannot be read or decoded. ``"stop"`` raises;
            ``"skip"`` goes on without it (:mod:`~largebatch.pipeline.decode.reader`).
        stages: epochs from which on training has another image size or batch size.

    Attributes:
        wait_seconds: how long iterations have waited for a batch so far.
        replaced: how many images of training stood in so far for such as cannot be used.
        reader: reads the images; None where they are synthetic.
        backend: the name of what decodes.
        threads: that decode.
        prefetch: batches made ahead.

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
        prefetch: int | None = None,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
        on_error: str = "stop",
        stages: Sequence[Stage] = (),
    ) -> None:
        if micro_batch_size is None:
            micro_batch_size = max(1, batch_size // world_size)
        if dtype not in (torch.float32, torch.float16):
            raise DataError(f"dtype {dtype} of images is not one of torch.float32, torch.float16")
        if on_error not in ON_ERROR:
            raise DataError(f"on_error {on_error!r} is not one of {', '.join(ON_ERROR)}")
        self.source = source
        self.transform = transform
        self.training = training
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.device = _with_index(torch.device(device))
        self.wait_seconds = 0.0
        self.replaced = 0
        self._phases: tuple[Phase, ...] = (
            Phase(0, transform.image_size, batch_size, micro_batch_size),
        )
        self._end: int | None = None
        if training:
            images = len(source)
            self._phases = lay_out(self._phases[0], stages, images=images, world_size=world_size)
            if epochs is not None:
                self._phases, self._end = until(self._phases, epochs, images)
        self._position = 0
        self._form = MemoryLayout(dtype, memory_format)
        self.threads = threads or _share_of_cores()
        self.prefetch = prefetch or _PREFETCH
        self.reader: Reader | None = None
        if not isinstance(source, Synthetic):
            self.reader = Reader(source, transform, training=training, on_error=on_error)
        self.backend, self._back_end = self._choose(backend)

    def __iter__(self) -> Iterator[Batch]:
        batches = self._batches()
        while True:
            start = time.perf_counter()
            decoded = next(batches, None)
            self.wait_seconds += time.perf_counter() - start
            if decoded is None:
                return
            if self.training:
                self._position += self.micro_batch_size * self.world_size
                self.replaced += decoded.request.replaced if decoded.request else 0
            yield decoded.batch

    @property
    def _phase(self) -> Phase:
        return phase_at(self._phases, self._position)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The sizes of images and batches, one after the other, over all of training."""
        return self._phases

    @property
    def batch_size(self) -> int:
        """The global batch, at this stage of training."""
        return self._phase.batch_size

    @property
    def micro_batch_size(self) -> int:
        """Images per batch of this rank, at this stage of training."""
        return self._phase.micro_batch_size

    @property
    def image_size(self) -> int:
        """Pixels on each side of training images, at this stage."""
        return self._phase.image_size

    @property
    def accumulation(self) -> int:
        """Micro-batches of a rank that make up its part of a global batch, at this stage."""
        return self.batch_size // (self.micro_batch_size * self.world_size)

    @property
    def steps_per_epoch(self) -> float:
        """Global batches in an epoch, at the first stage."""
        return len(self.source) / self._phases[0].batch_size

    @property
    def total_steps(self) -> int | None:
        """Global batches of the whole training, over all stages; None if it never ends."""
        if self._end is None:
            return None
        ends = [*(phase.start for phase in self._phases[1:]), self._end]
        return sum(
            (end - phase.start) // phase.batch_size
            for phase, end in zip(self._phases, ends, strict=True)
        )

    @property
    def skipped(self) -> dict[str, str]:
        """What is wrong with each image that this rank met and cannot use, by name."""
        return self.reader.named_skipped() if self.reader else {}

    @property
    def epoch(self) -> float:
        """How many epochs of training have been given out, on all ranks together."""
        return self._position / len(self.source)

    def state_dict(self) -> dict[str, Any]:
        """Where training stands: after the last batch that was given out, on all ranks alike."""
        return {
            "position": self._position,
            "fingerprint": self._fingerprint(),
            "made_with": self._made_with(),
        }

    def load_state_dict(self, state: dict[str, Any], *, reshard: bool = False) -> list[str]:
        """Go on from where ``state`` was taken, with the same images and crops as if unbroken.

        Args:
            state: from :meth:`state_dict`.
            reshard: take a state of another number of ranks or batch size, and go on with the
                images of the epoch that were not yet given out.

        Returns:
            What else is not as it was, which changes no order but may change the last bit of
            pixels: the back end, or a version.

        Raises:
            DataError: the state is of other data, another seed or (without ``reshard``) other
                ranks or batches; the message names the difference.
        """
        check(state["fingerprint"], self._fingerprint(), reshard=reshard)
        self._position = state["position"]
        return changes(state["made_with"], self._made_with())

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "version": ORDER_VERSION,
            "source": self.source.kind,
            "images": len(self.source),
            "files": self.source.fingerprint,
            "seed": self.seed,
            "batch_size": self._phases[0].batch_size,
            "micro_batch_size": self._phases[0].micro_batch_size,
            "world_size": self.world_size,
        }

    def _made_with(self) -> dict[str, str]:
        return {
            "largebatch": __version__,
            "the input's back end": f"{self.backend} {self._back_end.version}",
            "the form of images": f"{self._form.dtype}, {self._form.memory_format}",
        }

    def time_stages(self, request: Request) -> tuple[float, float]:
        """Seconds that decoding a request and transforming it take on one thread.

        Raises:
            ValueError: the loader's images are synthetic.
        """
        if isinstance(self._back_end, SyntheticBackend):
            raise ValueError("synthetic images have no stages")
        return self._back_end.time_request(request)

    def _batches(self) -> Iterator[DecodedBatch]:
        if isinstance(self._back_end, SyntheticBackend):
            return self._back_end(self._pieces())
        assert self.reader is not None
        return self._back_end(prefetch(self._requests(self.reader), self.prefetch))

    def _choose(
        self, backend: str
    ) -> tuple[str, DaliBackend | TorchvisionBackend | SyntheticBackend]:
        if self.reader is None:
            return "synthetic", SyntheticBackend(
                len(self.source.classes),
                self._form,
                seed=self.seed,
                size=None if self.training else self.micro_batch_size,
                device=self.device,
            )
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
        if backend == "torchvision":
            return backend, TorchvisionBackend(
                self.reader,
                self.transform,
                self._form,
                device=self.device,
                threads=self.threads,
                prefetch=self.prefetch,
            )
        return backend, DaliBackend(
            self.reader,
            self.transform,
            self._form,
            max_batch=max(phase.micro_batch_size for phase in self._phases),
            device=self.device,
            gpu=backend == "dali-gpu",
            threads=self.threads,
            prefetch=self.prefetch,
        )

    def _requests(self, reader: Reader) -> Iterator[Request]:
        stream = Stream(len(self.source), self.seed)
        for start, count, image_size in self._pieces():
            uniforms = None
            if self.training:
                indices, uniforms = stream.take(start, count)
            else:
                indices = np.arange(start, start + count)
            request = reader.request(indices, uniforms, image_size)
            if len(request.indices):
                yield request

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """Start (in the stream, or in the images), length and image size of each micro-batch of
        this rank."""
        if not self.training:
            size = self.micro_batch_size
            share = evaluation_share(len(self.source), self.rank, self.world_size)
            for start in range(share.start, share.stop, size):
                yield start, min(size, share.stop - start), self.transform.image_size
            return
        position = self._position
        while self._end is None or position < self._end:
            phase = phase_at(self._phases, position)
            size = phase.micro_batch_size
            yield position + self.rank * size, size, phase.image_size
            position += self.world_size * size


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def _with_index(device: torch.device) -> torch.device:
    """``device``, and the current GPU for ``cuda``: other threads and DALI have another current."""
    if str(device) == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _share_of_cores() -> int:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks)
