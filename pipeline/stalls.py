"""Why a training step waits for its data, and what would help: from measured times."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, replace

import numpy as np

from .decode.batch import Request
from .decode.pillow import decode
from .decode.reader import Reader
from .loader import Loader
from .order import UNIFORMS
from .sources import Synthetic

#: Share of the time spent waiting from which on a run is called input-bound.
INPUT_BOUND = 0.05

_IMAGES = 48
_QUALITY = 90
_HEADROOM = 1.1  # a stage that is just fast enough still makes others wait now and then


@dataclass(frozen=True)
class StageTimes:
    """What an image takes in each stage, on one thread.

    Attributes:
        read_seconds: to read its bytes, as it was in this run.
        decode_seconds: to decode the region that is cut.
        transform_seconds: to resize, mirror and normalise it.
        smaller_decode_seconds: to decode it, were it stored at ``smaller_side``; None if it is no
            larger.
        smaller_side: pixels on the shorter side, enough for the crops of the transform.
        side: mean of the pixels on the shorter side.
        encoded_bytes: mean size of the files.
    """

    read_seconds: float
    decode_seconds: float
    transform_seconds: float
    smaller_decode_seconds: float | None
    smaller_side: int
    side: float
    encoded_bytes: float


def measure_stages(loader: Loader) -> StageTimes:
    """Take the stages of a loader apart, on some of its images; a few seconds.

    Raises:
        DataError: an image cannot be used.
        ValueError: the loader's images are synthetic.
    """
    reader, source = loader.reader, loader.source
    if reader is None or isinstance(source, Synthetic):
        raise ValueError("synthetic images have no stages")
    rng = np.random.default_rng(loader.seed)
    count = min(_IMAGES, loader.micro_batch_size)
    indices = rng.integers(0, len(source), count)
    uniforms = rng.random((count, UNIFORMS)) if loader.training else None
    if not reader.images:
        reader.request(indices, uniforms, loader.image_size)
    read_seconds = reader.read_seconds / reader.images
    request = reader.request(indices, uniforms, loader.image_size)
    decode_seconds, transform_seconds = loader.time_stages(request)

    sides = [min(decode(content).size) for content in request.contents]
    # At this size the smallest crop that is usual still has as many pixels as the model sees.
    smaller_side = max(loader.transform.eval_resize, 3 * loader.image_size // 2)
    smaller_seconds = None
    if np.mean(sides) > 1.1 * smaller_side:
        smaller_seconds = loader.time_stages(_smaller(reader, request, smaller_side))[0] / count
    return StageTimes(
        read_seconds=read_seconds,
        decode_seconds=decode_seconds / count,
        transform_seconds=transform_seconds / count,
        smaller_decode_seconds=smaller_seconds,
        smaller_side=smaller_side,
        side=float(np.mean(sides)),
        encoded_bytes=float(np.mean([len(content) for content in request.contents])),
    )


def advice(
    times: StageTimes,
    *,
    images_per_second: float,
    wait_share: float,
    backend: str,
    threads: int,
    cores: int,
    on_gpu: bool,
) -> list[str]:
    """Which stage a run waits for, and what would help, each in a line.

    Args:
        times: of the stages.
        images_per_second: of one rank, waiting included.
        wait_share: share of the time that it waited.
        backend: that decodes.
        threads: that decode.
        cores: of the machine, for each rank.
        on_gpu: whether the model is on a GPU.
    """
    wanted = images_per_second / max(1 - wait_share, 0.01)
    work_seconds = times.decode_seconds + times.transform_seconds
    lines = [
        f"an image takes {1000 * times.read_seconds:.2f} ms to read, and on one thread "
        f"{1000 * times.decode_seconds:.2f} ms to decode and "
        f"{1000 * times.transform_seconds:.2f} ms to transform: {threads / work_seconds:,.0f} "
        f"images/s on {threads} threads, where the model takes {wanted:,.0f}"
    ]
    reads = 1 / times.read_seconds >= _HEADROOM * wanted
    works = threads / work_seconds >= _HEADROOM * wanted
    if not reads:
        lines.append(
            f"shards: files of {times.encoded_bytes / 1000:,.0f} kB are read one by one; "
            "largebatch data prepare folder --format webdataset packs them, or take a faster disk"
        )
    if reads and works:
        lines.append(
            "each stage alone is fast enough: try data.prefetch=4, and look at what else "
            "uses the cores"
        )
    if works:
        return lines
    needed = math.ceil(_HEADROOM * wanted * work_seconds)
    if threads < min(needed, cores):
        lines.append(f"threads: data.threads={min(needed, cores)} in place of {threads}")
    if backend == "torchvision":
        lines.append("DALI, which decodes faster: data.backend=dali-cpu")
    if on_gpu and backend != "dali-gpu":
        lines.append("decoding on the GPU: data.backend=dali-gpu")
    if times.smaller_decode_seconds and times.smaller_decode_seconds < 0.9 * times.decode_seconds:
        lines.append(
            f"smaller files: with {times.smaller_side} pixels on the shorter side in place of "
            f"{times.side:.0f} decoding takes {1000 * times.smaller_decode_seconds:.2f} ms; "
            f"largebatch data prepare folder --resize {times.smaller_side}"
        )
    if needed > cores:
        lines.append(f"cores: {needed} for each rank keep up with the model, there are {cores}")
    return lines


def _smaller(reader: Reader, request: Request, side: int) -> Request:
    """The same request, were its images stored with at most ``side`` pixels on their shorter
    side."""
    contents, sizes = [], []
    for content in request.contents:
        image = decode(content)
        scale = min(1.0, side / min(image.size))
        image = image.resize((max(1, round(image.width * scale)), round(image.height * scale)))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=_QUALITY)
        contents.append(np.frombuffer(file.getvalue(), dtype=np.uint8))
        sizes.append(image.size)
    cut = reader.cut(np.array(sizes, dtype=np.int64), request.uniforms, request.image_size)
    return replace(request, contents=contents, cut=cut)
