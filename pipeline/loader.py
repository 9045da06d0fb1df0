"""The loader: prefetched micro-batches for one rank, resumable after any of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from .. import __version__
from .decode.backends import Backend, choose, default_prefetch, make
from .decode.batch import Batch, DecodedBatch, MemoryLayout, Request, prefetch
from .decode.crops import FLIP, Transform
from .decode.erasing import erase
from .decode.options import check_options
from .decode.reader import Reader
from .decode.synthetic import SyntheticBackend
from .errors import DataError
from .fingerprint import ORDER_VERSION, changes, check
from .order import Stream, evaluation_share
from .sources import Source, Synthetic
from .stages import Phase, Stage, StageTimeline, check_made_for, lay_out


class Loader:
    """Iterates over the micro-batches (:class:`Batch`) of one rank.

    Training runs for ``epochs`` epochs (endlessly if None), in the global order of
    :mod:`~largebatch.pipeline.order`: micro-batch t of rank r holds images ``(t W + r) m`` to
    ``(t W + r + 1) m`` of the stream, where m is the micro-batch size and W the number of ranks;
    ``batch_size / (m W)`` micro-batches make up a global batch. Evaluation passes once over this
    rank's share of the images; each image is in exactly one rank's share, and the last batch may
    be smaller.

    Args:
        source: The images.
        transform: Cropping, resizing, flipping and normalization.
        batch_size: Images per global batch; a multiple of ``micro_batch_size * world_size``.
        micro_batch_size: Images per batch of this rank; by default ``batch_size / world_size``.
        training: True shuffles and augments; False evaluates.
        epochs: Length of training, rounded to whole global batches; None never ends.
        seed: Seed of the order and the augmentation, >= 0.
        repeats: Number of consecutive positions of an epoch of training that show the same image,
            each augmented on its own; the epoch keeps its length.
        rank: This rank among all ranks of the job.
        world_size: Number of ranks of the job.
        device: Where batches are delivered; ``"cuda"`` is the current GPU.
        backend: One of ``BACKENDS`` or ``"auto"``, the fastest for ``device`` that is installed.
        threads: Number of decoding threads; by default this rank's share of the machine's cores.
        prefetch: Number of batches prepared in advance; by default 2, or 4 where DALI decodes on a
            GPU of compute capability 9.0 or higher.
        hw_decoder_load: Share of JPEG images, in [0, 1], for the GPU's hardware decoder, where DALI
            decodes there; by default 0.95 from compute capability 9.0 on, below it DALI's own.
        dtype: Dtype of the images, FP32 or FP16.
        memory_format: Of the images, ``torch.contiguous_format`` or ``torch.channels_last``.
        on_error: What to do with an image that cannot be read or decoded. ``"stop"`` raises;
            ``"skip"`` continues without it, for this epoch if it cannot be read
            (:mod:`~largebatch.pipeline.decode.reader`).
        verify: Which images are errors. ``"decode"``: those that the backend cannot decode.
            ``"strict"``: also damaged ones (:mod:`~largebatch.pipeline.decode.verify`), the same
            with every backend.
        stages: Changes of image size or batch size in training, in order.
        timeline: The stages of training, laid out beforehand by :func:`lay_out`; replaces
            ``micro_batch_size``, ``epochs`` and ``stages``.

    Attributes:
        timeline: The phases of training, with the conversions between steps, images and epochs.
        batch_position: Place in the stream of the first image of this rank's last training batch.
        wait_seconds: Total time that iteration has waited for batches, in seconds.
        replaced: Number of training images substituted so far for unreadable ones.
        reader: Reads the encoded images; None for synthetic images.
        backend: Name of the decoding backend, as chosen.
        cores: Number of cores that are this rank's share of the machine.

    Raises:
        DataError: an argument is out of range, the batch does not divide among the ranks,
            ``timeline`` is that of another run, or the backend is not installed.
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
        repeats: int = 1,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        backend: str = "auto",
        threads: int | None = None,
        prefetch: int | None = None,
        hw_decoder_load: float | None = None,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
        on_error: str = "stop",
        verify: str = "decode",
        stages: Sequence[Stage] = (),
        timeline: StageTimeline | None = None,
    ) -> None:
        load, dtypes = hw_decoder_load, (torch.float32, torch.float16)
        counts = {
            "batch_size": batch_size,
            "micro_batch_size": micro_batch_size,
            "threads": threads,
        }
        counts |= {"prefetch": prefetch, "repeats": repeats}
        for name, value, is_valid, valid in (
            *((name, n, n is None or n > 0, "at least 1") for name, n in counts.items()),
            ("seed", seed, seed >= 0, "at least 0"),
            ("rank", rank, 0 <= rank < world_size, f"from 0, below world_size ({world_size})"),
            ("hw_decoder_load", load, load is None or 0 <= load <= 1, "0 to 1"),
            ("dtype", dtype, dtype in dtypes, ", ".join(map(str, dtypes))),
        ):
            if not is_valid:
                raise DataError(f"{name}: {value} is not valid; valid: {valid}")
        check_options(on_error, verify)
        self.source = source
        self.transform = transform
        self.training = training
        self.seed = seed
        self.repeats = repeats
        self.rank = rank
        self.world_size = world_size
        self.device = _with_index(torch.device(device))
        self.wait_seconds = 0.0
        self.replaced = 0
        images = len(source)
        if timeline is not None:
            if stages or epochs is not None or micro_batch_size is not None or not training:
                raise DataError(
                    "timeline: already holds micro_batch_size, epochs and stages of training; "
                    "valid: leave those out, and leave out timeline in evaluation"
                )
            check_made_for(timeline, images, world_size, batch_size)
            self.timeline = timeline
        else:
            if micro_batch_size is None:
                micro_batch_size = max(1, batch_size // world_size)
            first = Phase(0, transform.image_size, batch_size, micro_batch_size)
            self.timeline = StageTimeline(images, world_size, (first,), None)
            if training:
                self.timeline = lay_out(
                    first, stages, images=images, world_size=world_size, epochs=epochs
                )
        self._position = self.batch_position = 0
        self._layout = MemoryLayout(dtype, memory_format)
        self.cores = _share_of_cores()
        self.threads = threads or self.cores
        self.hw_decoder_load = hw_decoder_load
        self._prefetch = prefetch
        self.reader: Reader | None = None
        self.backend = "synthetic"
        if not isinstance(source, Synthetic):
            self.reader = Reader(
                source, transform, training=training, on_error=on_error, verify=verify
            )
            largest = max(phase.image_size for phase in self.timeline.phases)
            augment = transform.auto_augment if training else None
            self.backend = choose(backend, self.device, largest, augment)

    def __iter__(self) -> Iterator[Batch]:
        batches = self._batches()
        while True:
            start = time.perf_counter()
            decoded = next(batches, None)
            self.wait_seconds += time.perf_counter() - start
            if decoded is None:
                return
            if self.training:
                size = self.micro_batch_size
                self.batch_position = self._position + self.rank * size
                self._position += size * self.world_size
                self.replaced += decoded.request.replaced if decoded.request else 0
            yield decoded.batch

    @property
    def phase(self) -> Phase:
        """The current phase of training, with its image size and batch sizes."""
        return self.timeline.phase_at(self._position)

    @property
    def micro_batch_size(self) -> int:
        """Images per batch of this rank, in the current stage."""
        return self.phase.micro_batch_size

    @property
    def full_batch(self) -> int:
        """Images of a full batch of any rank, in the current stage.

        This is ``micro_batch_size``, or in evaluation the largest share of a rank if that is less.
        """
        if self.training:
            return self.micro_batch_size
        return min(self.micro_batch_size, -(-len(self.source) // self.world_size))

    def empty_batch(self) -> Batch:
        """Allocate a full batch of the current stage, with any content.

        Images and labels have the shapes, dtypes, strides and device of those delivered.
        """
        count, size = self.full_batch, self.phase.image_size
        images = torch.empty(
            (count, 3, size, size),
            dtype=self._layout.dtype,
            device=self.device,
            memory_format=self._layout.memory_format,
        )
        return Batch(images, torch.empty(count, dtype=torch.int64, device=self.device))

    @property
    def accumulation(self) -> int:
        """Number of micro-batches of a rank in each global batch, in the current stage."""
        return self.phase.accumulation(self.world_size)

    @property
    def total_steps(self) -> int | None:
        """Number of global batches in the whole training; None if it never ends."""
        return None if self.timeline.end is None else self.timeline.total_steps

    @property
    def skipped(self) -> dict[str, str]:
        """Why each image that this rank could not use so far was unusable, by image name."""
        return self.reader.skipped if self.reader else {}

    @property
    def left_out(self) -> int:
        """Number of images that the last evaluation, or this epoch, could not use on this rank."""
        return self.reader.left_out if self.reader else 0

    @property
    def epoch(self) -> float:
        """Number of epochs of training delivered so far, over all ranks."""
        return self.timeline.epochs(self._position)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch delivered, which is the same on all ranks."""
        return {
            "position": self._position,
            "fingerprint": self._fingerprint(),
            "made_with": self._made_with(),
        }

    def load_state_dict(self, state: dict[str, Any], *, reshard: bool = False) -> list[str]:
        """Resume where ``state`` was taken, with the images and crops of an uninterrupted run.

        Returns one line for each difference, in the backend or a version, that keeps the order but
        may change the last bit of pixels.

        Args:
            state: From :meth:`state_dict`.
            reshard: Accept a state of another number of ranks or batch size, and continue with
                the images of the epoch that were not yet delivered.

        Raises:
            DataError: The state is of other data, another seed or, without ``reshard``, another
                number of ranks or batch size; the message names the difference.
        """
        position = check(state, self._fingerprint(), reshard=reshard)
        found = changes(state["made_with"], self._made_with())
        self._position = position
        return found

    def _fingerprint(self) -> dict[str, Any]:
        first = self.timeline.phases[0]
        return {
            "version": ORDER_VERSION,
            "source": self.source.kind,
            "images": len(self.source),
            "files": self.source.fingerprint,
            "seed": self.seed,
            "repeats": self.repeats,
            "batch_size": first.batch_size,
            "micro_batch_size": first.micro_batch_size,
            "world_size": self.world_size,
        }

    def _made_with(self) -> dict[str, str]:
        return {
            "largebatch": __version__,
            "the input's back end": f"{self.backend} {self._decoder.version}",
            "the form of images": f"{self._layout.dtype}, {self._layout.memory_format}",
        }

    def time_request(self, request: Request) -> tuple[float, float]:
        """Return the seconds that one thread takes to decode a request and to transform it."""
        assert not isinstance(self._decoder, SyntheticBackend)  # which decodes nothing
        return self._decoder.time_request(request)

    def _batches(self) -> Iterator[DecodedBatch]:
        if isinstance(self._decoder, SyntheticBackend):
            return self._decoder(self._pieces())
        assert self.reader is not None
        batches = self._decoder(prefetch(self._requests(self.reader), self.prefetch))
        if not (self.training and self.transform.erasing):
            return batches
        return erase(batches, self.transform.erasing)

    @cached_property
    def prefetch(self) -> int:
        """Number of batches prepared in advance; the default initialises the GPU."""
        return self._prefetch or default_prefetch(self.backend, self.device)

    @cached_property
    def _decoder(self) -> Backend | SyntheticBackend:
        if self.reader is None:
            size = None if self.training else self.micro_batch_size
            classes = len(self.source.classes)
            return SyntheticBackend(classes, self._layout, self.seed, size, self.device)
        return make(
            self.backend,
            self.reader,
            self.transform,
            self._layout,
            max_batch=max(phase.micro_batch_size for phase in self.timeline.phases),
            device=self.device,
            threads=self.threads,
            prefetch=self.prefetch,
            hw_decoder_load=self.hw_decoder_load,
        )

    def _requests(self, reader: Reader) -> Iterator[Request]:
        alternating = FLIP if self.transform.flip == "alternating" else None
        stream = Stream(
            len(self.source),
            self.seed,
            alternating,
            further=self.transform.needs_further,
            repeats=self.repeats,
        )
        epoch = None
        for start, count, image_size in self._pieces():
            now = start // len(self.source) if self.training else 0
            if now != epoch:
                epoch = now
                reader.begin_epoch()
            indices, uniforms = np.arange(start, start + count), None
            if self.training:
                indices, uniforms = stream.take(start, count)
            request = reader.request(indices, uniforms, image_size)
            if len(request.indices):
                yield request

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yield start, length and image size of each micro-batch, in the stream or the source."""
        if not self.training:
            size = self.micro_batch_size
            share = evaluation_share(len(self.source), self.rank, self.world_size)
            for start in range(share.start, share.stop, size):
                yield start, min(size, share.stop - start), self.transform.image_size
            return
        position = self._position
        end = self.timeline.end
        while end is None or position < end:
            phase = self.timeline.phase_at(position)
            size = phase.micro_batch_size
            yield position + self.rank * size, size, phase.image_size
            position += self.world_size * size


def _with_index(device: torch.device) -> torch.device:
    """Return ``device`` with an index: other threads and DALI have another current GPU."""
    if str(device) == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _share_of_cores() -> int:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = os.sched_getaffinity(0)
    # A rank that torchrun bound to the cores of a NUMA node shares them with some of the ranks
    # only; torchrun itself, its parent, has those of all.
    of_all = own | os.sched_getaffinity(os.getppid()) if ranks > 1 else own
    return max(1, min(len(own), len(of_all) // ranks))
