"""Images that data sets have and should not, and what the loader makes of each.

``python -m benchmarks.pipeline.odd_images`` reads each of them with each back end, once
stopping and once skipping, and writes benchmarks/results/odd_images.md.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

GOOD = 12


def encode(image: Image.Image, form: str, **options: object) -> bytes:
    """The image in a file of ``form``."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def picture(width: int = 80, height: int = 60, seed: int = 0) -> Image.Image:
    """A smooth random image in RGB."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def _exif_turned() -> bytes:
    exif = Image.Exif()
    exif[0x112] = 6
    return encode(picture(), "JPEG", quality=92, exif=exif)


def _sixteen_bits() -> bytes:
    levels = np.asarray(picture().convert("L")).astype(np.uint16) * 257
    return encode(Image.fromarray(levels), "PNG")


def _jpeg() -> bytes:
    return encode(picture(), "JPEG", quality=92)


#: Images that are odd, and can be used all the same: what is in the file ``odd.JPEG``.
USABLE: dict[str, Callable[[], bytes]] = {
    "CMYK JPEG": lambda: encode(picture().convert("CMYK"), "JPEG", quality=92),
    "grey JPEG": lambda: encode(picture().convert("L"), "JPEG", quality=92),
    "progressive JPEG": lambda: encode(picture(), "JPEG", quality=92, progressive=True),
    "JPEG turned by EXIF": _exif_turned,
    "JPEG with bytes after its end": lambda: _jpeg() + b"\0" * 17,
    "PNG named JPEG": lambda: encode(picture(), "PNG"),
    "GIF named JPEG": lambda: encode(picture(), "GIF"),
    "WebP named JPEG": lambda: encode(picture(), "WEBP", lossless=True),
    "PNG with transparency": lambda: encode(picture().convert("RGBA"), "PNG"),
    "PNG with a palette": lambda: encode(picture().convert("P"), "PNG"),
    "PNG of 16 bits, grey": _sixteen_bits,
    "1 × 1 pixel": lambda: encode(picture(1, 1), "JPEG"),
    "2,000 × 3 pixels": lambda: encode(picture(2000, 3), "JPEG"),
}

#: Images that cannot be used; None stands for what is no file.
UNUSABLE: dict[str, Callable[[], bytes | None]] = {
    "empty": lambda: b"",
    "a web page": lambda: b"<html>404 not found</html>",
    "JPEG cut in the middle": lambda: _jpeg()[: len(_jpeg()) // 2],
    "JPEG without its last 2 bytes": lambda: _jpeg()[:-2],
    "JPEG without anything but its header": lambda: _jpeg()[:300],
    "PNG cut in the middle": lambda: encode(picture(), "PNG")[:2000],
    "PNG with damaged data": lambda: _damaged(encode(picture(), "PNG")),
    "a directory": lambda: None,
}


def _damaged(content: bytes) -> bytes:
    middle = len(content) // 2
    return (
        content[:middle]
        + bytes(255 - b for b in content[middle : middle + 40])
        + content[middle + 40 :]
    )


def write_folder(root: Path, content: bytes | None) -> Path:
    """A data set of one class for training and evaluation, with the odd image in it.

    Returns:
        The path of the odd image in ``train``.
    """
    for split in ("train", "val"):
        folder = root / split / "class"
        folder.mkdir(parents=True)
        for i in range(GOOD):
            (folder / f"{i:02d}.JPEG").write_bytes(encode(picture(seed=i + 1), "JPEG"))
        odd = folder / "05odd.JPEG"
        if content is None:
            odd.mkdir()
        else:
            odd.write_bytes(content)
    return root / "train" / "class" / "05odd.JPEG"


def main() -> None:
    """Write the table."""
    from benchmarks.tables import RESULTS
    from largebatch.pipeline import DataError, ImageFolder, Loader, Transform

    transform = Transform(image_size=32, eval_resize=36)
    cases: dict[str, Callable[[], bytes | None]] = {**USABLE, **UNUSABLE}
    rows = [
        "| image | DALI on the CPU | torchvision | with `data.on_error=skip` |",
        "|---|---|---|---|",
    ]
    for name, content in cases.items():
        cells = []
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder), content())
            source = ImageFolder(folder, "train")
            skips = set()
            for backend in ("dali-cpu", "torchvision"):
                options = {"batch_size": 13, "epochs": 1, "backend": backend}
                try:
                    count = sum(len(b.labels) for b in Loader(source, transform, **options))
                    cells.append("used" if count == len(source) else f"{count} images")
                except DataError as error:
                    what = str(error).partition("05odd.JPEG ")[2].partition("; ")[0]
                    cells.append(f"stops: {what}")
                skipping = Loader(source, transform, on_error="skip", **options)
                count = sum(len(b.labels) for b in skipping)
                skips.add(
                    f"another in its place, {count} of {len(source)} images"
                    if skipping.skipped
                    else "used"
                )
            cells.append(", ".join(sorted(skips)))
        rows.append(f"| {name} | {' | '.join(cells)} |")
        print(rows[-1])
    (RESULTS / "odd_images.md").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
