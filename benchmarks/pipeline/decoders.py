"""Claim: of the libraries that decode JPEG and can be installed from PyPI, nvImageCodec followed by
torch's resizing takes the least CPU time per training image.

    pip install opencv-python-headless simplejpeg torchcodec
    python -m benchmarks.pipeline.decoders --sample imagenet-sample.tar

Each contender makes the same random crops of 224 pixels from the sample's photographs, as 8-bit
RGB on one thread. They take turns in one process. CPU time counts all threads of the process.
Pixels are compared with those of Pillow and torchvision, in levels of 0 to 255. Libraries that are
not installed are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import statistics
import tarfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg

from benchmarks.tables import RESULTS
from largebatch.pipeline import Transform
from largebatch.pipeline.decode.batch import MemoryLayout, Request
from largebatch.pipeline.decode.crops import Crop, training_crop
from largebatch.pipeline.decode.dali import DaliBackend
from largebatch.pipeline.decode.header import image_size
from largebatch.pipeline.decode.nvimgcodec import NvimgcodecBackend, _resize
from largebatch.pipeline.decode.torchvision import TorchvisionBackend
from largebatch.pipeline.order import UNIFORMS
from largebatch.recipes.training.summary import processor, versions

SIZE = 224
CPU: dict[str, Any] = {"device": torch.device("cpu"), "threads": 1, "prefetch": 1}
#: Levels of 0 to 255 after normalisation.
LEVELS = Transform(image_size=SIZE, mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255))
OTHERS = {"simplejpeg": "simplejpeg", "cv2": "opencv-python-headless", "torchcodec": "torchcodec"}

#: Makes the image of that number, 8-bit RGB, ``[224, 224, 3]``.
Make = Callable[[int], Any]


def whole_image(decode: Callable[[Any], Any], request: Request) -> Make:
    """Return a contender that decodes the whole image, cuts the crop and resizes it with torch."""

    def make(i: int) -> Any:
        x, y, width, height = request.crop.region[i]
        image = np.asarray(decode(request.contents[i]))
        return _resize(image[y : y + height, x : x + width], SIZE, SIZE, "bilinear")

    return make


def scaled(decode: Callable[[Any, int], Any], request: Request) -> Make:
    """Return a contender that decodes at 1/2, 1/4 or 1/8 where the crop stays large enough."""

    def make(i: int) -> Any:
        x, y, width, height = request.crop.region[i]
        factor = max(f for f in (1, 2, 4, 8) if f == 1 or min(width, height) >= f * SIZE)
        image = decode(request.contents[i], factor)
        whole = image_size(request.contents[i])
        fx, fy = (a / b for a, b in zip(image.size, whole, strict=True))
        right, bottom = min((x + width) * fx, image.width), min((y + height) * fy, image.height)
        box = (x * fx, y * fy, right, bottom)
        return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box))

    return make


def pillow(content: Any, factor: int) -> Image.Image:
    """Decode with Pillow, at a fraction of the size."""
    image = Image.open(io.BytesIO(content.data))
    if factor > 1:
        image.draft("RGB", tuple(-(-side // factor) for side in image.size))
    return image.convert("RGB")


def contenders(request: Request) -> dict[str, Make]:
    """Return what can be measured with the packages that are installed."""
    layout = MemoryLayout()
    ours = NvimgcodecBackend(None, LEVELS, layout, **CPU)  # type: ignore[arg-type]

    def resized(i: int) -> Any:
        return _resize(ours._region(request, i), SIZE, SIZE, "bilinear")

    made: dict[str, Make] = {
        "nvImageCodec, the crop alone": resized,
        "torchvision.io": whole_image(
            lambda c: decode_jpeg(torch.from_numpy(c), ImageReadMode.RGB).permute(1, 2, 0), request
        ),
        "Pillow, resized by Pillow": scaled(lambda c, factor: pillow(c, 1), request),
        "Pillow, scaled decoding, resized by Pillow": scaled(pillow, request),
    }
    if importlib.util.find_spec("simplejpeg"):
        import simplejpeg

        def of_simplejpeg(content: Any, factor: int) -> Image.Image:
            width, height = (-(-side // factor) for side in image_size(content))
            options = {"min_width": width, "min_height": height, "min_factor": factor}
            found = simplejpeg.decode_jpeg(content, "RGB", **(options if factor > 1 else {}))
            return Image.fromarray(found)

        made["simplejpeg"] = whole_image(lambda c: simplejpeg.decode_jpeg(c, "RGB"), request)
        made["simplejpeg, scaled decoding, resized by Pillow"] = scaled(of_simplejpeg, request)
    if importlib.util.find_spec("cv2"):
        import cv2

        cv2.setNumThreads(1)
        flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
        made["OpenCV"] = whole_image(lambda c: cv2.imdecode(c, flags), request)
    if importlib.util.find_spec("torchcodec"):
        from torchcodec.decoders import decode_image

        made["torchcodec"] = whole_image(
            lambda c: decode_image(torch.from_numpy(c), mode="RGB").permute(1, 2, 0), request
        )
    return made


def dali(request: Request) -> Callable[[], torch.Tensor]:
    """Return what decodes and resizes all images with DALI; those of the same size for all."""
    backend = DaliBackend(
        None,  # type: ignore[arg-type]
        LEVELS,
        MemoryLayout(),
        max_batch=len(request.contents),
        device=CPU["device"],
        gpu=False,
        threads=1,
        prefetch=1,
    )
    graph = backend._graph(
        lambda: backend._inputs(request),
        whole=True,
        **(backend._options | {"num_threads": 1}),
    )
    return lambda: backend._images(graph.run()[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sample", type=Path, required=True, help="tar of ImageNet's JPEG files")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tarfile.open(options.sample) as archive:
        files = sorted((m for m in archive if m.name.endswith(".JPEG")), key=lambda m: m.name)
        contents = [np.frombuffer(archive.extractfile(m).read(), np.uint8) for m in files]  # type: ignore[union-attr]
    count = len(contents)
    sizes = np.array([image_size(content) for content in contents])
    crop = training_crop(sizes, np.random.default_rng(0).random((count, UNIFORMS)), LEVELS)
    crop = Crop(crop.region, crop.resized, crop.corner, np.zeros(count, np.bool_))
    numbers = np.arange(count)
    request = Request(numbers, numbers, contents, crop, SIZE, numbers, None)
    reference_of = TorchvisionBackend(None, LEVELS, MemoryLayout(), **CPU)  # type: ignore[arg-type]
    reference = torch.empty(count, 3, SIZE, SIZE)
    for i in range(count):
        reference_of._image(request, i, reference[i])

    makes = contenders(request)
    by_dali = dali(request)
    pixels = {
        name: torch.stack([torch.as_tensor(np.array(make(i))) for i in range(count)])
        for name, make in makes.items()
    }
    levels = {name: found.permute(0, 3, 1, 2).float() for name, found in pixels.items()}
    levels["DALI, with its resizing and normalisation"] = by_dali()
    milliseconds: dict[str, list[float]] = {name: [] for name in levels}
    for _ in range(options.repeats):
        for name, found in milliseconds.items():
            start = time.process_time()
            if name in makes:
                for i in range(count):
                    makes[name](i)
            else:
                by_dali()
            found.append(1000 * (time.process_time() - start) / count)
    lines = [
        "| decoder | CPU time per image, median | spread | mean difference in levels |",
        "|---|---:|---:|---:|",
    ]
    for name in sorted(milliseconds, key=lambda name: statistics.median(milliseconds[name])):
        found = milliseconds[name]
        difference = (levels[name] - reference).abs().mean()
        lines.append(
            f"| {name} | {statistics.median(found):.2f} ms | {min(found):.2f} to {max(found):.2f} "
            f"| {difference:.3f} |"
        )
    known = versions() | {
        name: version(name) for module, name in OTHERS.items() if importlib.util.find_spec(module)
    }
    packages = ", ".join(f"{name} {number}" for name, number in known.items())
    lines += ["", f"{date.today().isoformat()}, {processor()}, {options.repeats} turns, {packages}"]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "decoders.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
