"""The cause of input stalls and its remedies, from measured times."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from .decode.batch import Request
from .decode.pillow import decode, encode
from .decode.reader import Reader
from .loader import Loader
from .order import FURTHER, UNIFORMS
from .sources import Synthetic

#: A run is input-bound if it waits for data for at least this fraction of its time.
INPUT_BOUND = 0.05

_IMAGES = 48
_QUALITY = 90
_HEADROOM = 1.1  # a step that is only just fast enough still makes others wait now and then


@dataclass(frozen=True)
class InputTimes:
    """Time per image of reading, decoding and transforming, on one thread."""

    read_seconds: float  #: To read its bytes, as measured in this run, on several threads.
    decode_seconds: float  #: To decode the cropped region.
    transform_seconds: float  #: To resize, flip and normalise it.
    #: To decode the region if stored at ``smaller_side``; None if images are not clearly larger.
    smaller_decode_seconds: float | None
    smaller_side: int  #: Pixels of the shorter side that suffice for the transform's crops.
    side: float  #: Mean length in pixels of the shorter side of the images.
    encoded_bytes: float  #: Mean size of the encoded images.


def measure_input_times(loader: Loader) -> InputTimes:
    """Measure the input of a loader on some of its images, which takes a few seconds.

    Raises:
        DataError: An image cannot be used.
        ValueError: The loader's images are synthetic.
    """
    reader, source = loader.reader, loader.source
    if reader is None or isinstance(source, Synthetic):
        raise ValueError("synthetic images are not decoded: there is nothing to time")
    rng, image_size = np.random.default_rng(loader.seed), loader.phase.image_size
    count = min(_IMAGES, loader.micro_batch_size)
    indices = rng.integers(0, len(source), count)
    uniforms = rng.random((count, UNIFORMS + FURTHER)) if loader.training else None
    if not reader.images_read:
        reader.request(indices, uniforms, image_size)
    read_seconds = reader.read_seconds / reader.images_read
    request = reader.request(indices, uniforms, image_size)
    decode_seconds, transform_seconds = loader.time_request(request)

    sides = [min(decode(content).size) for content in request.contents]
    # At this size a small crop still has about as many pixels as the model's input.
    smaller_side = max(loader.transform.eval_resize, 3 * image_size // 2)
    smaller_seconds = None
    if np.mean(sides) > 1.1 * smaller_side:
        smaller_seconds = loader.time_request(_smaller(reader, request, smaller_side))[0] / count
    return InputTimes(
        read_seconds=read_seconds,
        decode_seconds=decode_seconds / count,
        transform_seconds=transform_seconds / count,
        smaller_decode_seconds=smaller_seconds,
        smaller_side=smaller_side,
        side=float(np.mean(sides)),
        encoded_bytes=float(np.mean([len(content) for content in request.contents])),
    )


def stall_advice(
    times: InputTimes,
    *,
    images_per_second: float,
    wait_share: float,
    backend: str,
    threads: int,
    cores: int,
    on_gpu: bool,
    auto_augment: str | None = None,
) -> list[str]:
    """Explain what a run waits for, and list remedies.

    Args:
        times: Measured times per image.
        images_per_second: Throughput of one rank, waiting included.
        wait_share: Fraction of the time that the rank waited for data.
        backend: Name of the decoding backend.
        threads: Number of decoding threads.
        cores: Number of cores of the machine per rank.
        on_gpu: Whether the model is on a GPU.
        auto_augment: ``Transform.auto_augment``, which DALI does not have.

    Returns:
        The measured times in one line, and remedies of the form ``what: how``.
    """
    wanted = images_per_second / max(1 - wait_share, 0.01)
    work_seconds = times.decode_seconds + times.transform_seconds
    times_line = (
        f"an image takes {1000 * times.read_seconds:.2f} ms to read, and on one thread "
        f"{1000 * times.decode_seconds:.2f} ms to decode and "
        f"{1000 * times.transform_seconds:.2f} ms to transform: {threads / work_seconds:,.0f} "
        f"images/s on {threads} threads; the model consumes {wanted:,.0f}"
    )
    reads = 1 / times.read_seconds >= _HEADROOM * wanted
    works = threads / work_seconds >= _HEADROOM * wanted
    remedies = []
    if not reads:
        remedies.append(
            f"shards: files of {times.encoded_bytes / 1000:,.0f} kB are read one by one; pack "
            "them with largebatch data prepare folder --format webdataset, or use a faster disk"
        )
    if reads and works:
        remedies.append(
            "reading and decoding are fast enough alone: try data.prefetch=8, and check what else "
            "uses the cores"
        )
    if works:
        return [times_line, *remedies]
    needed = math.ceil(_HEADROOM * wanted * work_seconds)
    if threads < (most := min(needed, cores)):
        remedies.append(f"threads: data.threads={most} instead of {threads}")
    if backend == "torchvision":
        remedies.append("a faster decoder: data.backend=auto, with largebatch[cuda13] installed")
    if on_gpu and backend != "dali-gpu" and auto_augment is None:
        remedies.append("decoding on the GPU: data.backend=dali-gpu")
    if times.smaller_decode_seconds and times.smaller_decode_seconds < 0.9 * times.decode_seconds:
        remedies.append(
            f"smaller files: with {times.smaller_side} pixels on the shorter side instead of "
            f"{times.side:.0f}, decoding takes {1000 * times.smaller_decode_seconds:.2f} ms; use "
            f"largebatch data prepare folder --resize {times.smaller_side}"
        )
    if needed > cores:
        remedies.append(
            f"cores: each rank needs {needed} to keep up with the model and has {cores}"
        )
    return [times_line, *remedies]


def _smaller(reader: Reader, request: Request, side: int) -> Request:
    """Return the request with its images stored at most ``side`` pixels on the shorter side."""
    contents, sizes = [], []
    for content in request.contents:
        image = decode(content)
        scale = min(1.0, side / min(image.size))
        image = image.resize((max(1, round(image.width * scale)), round(image.height * scale)))
        contents.append(np.frombuffer(encode(image, "JPEG", quality=_QUALITY), dtype=np.uint8))
        sizes.append(image.size)
    crop = reader.crop(np.array(sizes, dtype=np.int64), request.uniforms, request.image_size)
    return replace(request, contents=contents, crop=crop)
