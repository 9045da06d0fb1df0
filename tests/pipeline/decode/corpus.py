"""Pictures in the forms that people's files have, each made when it is asked for."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageChops

from benchmarks.pipeline.odd_images import encode


def picture(mode: str = "RGB", width: int = 96, height: int = 64) -> Image.Image:
    """Return a smooth random image."""
    coarse = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def segment(marker: int, content: bytes) -> bytes:
    """Return a JPEG segment with its marker and length."""
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def adobe(transform: int) -> bytes:
    """Return Adobe's marker, which states how colours were transformed."""
    return segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([transform]))


def exif(orientation: object, order: str = "<") -> bytes:
    """Return an EXIF marker with an orientation."""
    head = struct.pack(order + "2sHI", b"II" if order == "<" else b"MM", 42, 8)
    entry = struct.pack(order + "HHHIHH", 1, 0x112, 3, 1, orientation, 0)
    return segment(0xE1, b"Exif\0\0" + head + entry + bytes(4))


def markers_after_start(content: bytes, *markers: bytes) -> bytes:
    """Put markers directly after a JPEG file's start."""
    return content[:2] + b"".join(markers) + content[2:]


def without(content: bytes, *markers: int) -> bytes:
    """Remove all JPEG segments of some markers before the pixels."""
    kept, at = content[:2], 2
    while content[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(content[at + 2 : at + 4])
        kept += b"" if content[at + 1] in markers else content[at:end]
        at = end
    return kept + content[at:]


def png(
    levels: NDArray[np.integer], bits: int, colours: int, *chunks: bytes, interlaced: bool = False
) -> bytes:
    """Encode samples, ``[height, width, channels]``, as PNG of any bit depth and colour type.

    The chunks come between the header and the pixels. https://www.w3.org/TR/png-3/
    """
    height, width, _ = levels.shape
    rows = b""
    for x, y, dx, dy in ADAM7 if interlaced else [(0, 0, 1, 1)]:
        for row in levels[y::dy, x::dx]:
            if row.size:
                samples = "".join(f"{int(sample):0{bits}b}" for sample in row.ravel())
                samples += "0" * (-len(samples) % 8)
                rows += b"\0" + int(samples, 2).to_bytes(len(samples) // 8)
    header = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, interlaced)
    parts = [chunk(b"IHDR", header), *chunks, chunk(b"IDAT", zlib.compress(rows))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


def chunk(kind: bytes, content: bytes) -> bytes:
    """Return a PNG chunk with its length and checksum."""
    crc = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)


#: First column and row of each pass of an interlaced PNG file, and the distance to the next.
ADAM7 = [
    *[(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4)],
    *[(0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)],
]


def _jpegs() -> Iterator[tuple[str, bytes, Image.Image]]:
    """Yield name, content and expected picture of JPEG files by Pillow."""
    rgb, grey, cmyk = picture(), picture("L"), picture("CMYK")
    plain = encode(rgb, "JPEG", quality=95)
    yield "grey", encode(grey, "JPEG", quality=95), grey
    for size in ((1, 1), (2000, 3)):
        long = picture("RGB", *size)
        content = encode(long, "JPEG", quality=100, subsampling=0)
        yield f"{size[0]} x {size[1]} pixels", content, long
    for name in ("4:4:4", "4:2:2", "4:2:0"):
        for progressive in (False, True):
            options = {"subsampling": name, "progressive": progressive, "quality": 95}
            yield f"{name}, progressive {progressive}", encode(rgb, "JPEG", **options), rgb
    yield "restarts", encode(rgb, "JPEG", quality=95, restart_marker_blocks=3), rgb
    yield "optimized", encode(rgb, "JPEG", quality=95, optimize=True), rgb
    yield "no markers", without(plain, 0xE0), rgb
    yield "Adobe, YCbCr", markers_after_start(without(plain, 0xE0), adobe(1)), rgb
    yield "JFIF and Adobe", markers_after_start(plain, adobe(1)), rgb
    yield "JFIF and Adobe that says RGB", markers_after_start(plain, adobe(0)), rgb
    yield "bytes after the end", plain + bytes(17), rgb
    yield "fill bytes before a marker", plain[:2] + b"\xff\xff" + plain[2:], rgb
    for subsampling in (0, 2):
        content = encode(cmyk, "JPEG", quality=95, subsampling=subsampling)
        yield f"CMYK, Adobe, subsampling {subsampling}", content, cmyk
    bare = without(encode(cmyk, "JPEG", quality=95), 0xEE)
    yield "CMYK, no markers", bare, cmyk
    yield "CMYK, JFIF", markers_after_start(bare, JFIF), cmyk
    marked = encode(cmyk, "JPEG", quality=95)
    yield "CMYK, Adobe's marker after EXIF's", markers_after_start(marked, exif(8)), cmyk
    for orientation in range(10):
        for order in "<>":
            marked = markers_after_start(without(plain, 0xE0), exif(orientation, order))
            yield f"EXIF orientation {orientation}{order}", marked, rgb
    yield "EXIF before JFIF", markers_after_start(plain, exif(6)), rgb
    at = (small := encode(grey, "JPEG", quality=95)).index(b"\xff\xc0") + 11
    yield "grey as 2x2", small[:at] + b"\x22" + small[at + 1 :], grey
    wide = picture("RGB", 384, 256)  # so that little is lost by averaging colours
    for name in ("440", "411", "422", "420"):
        content = simplejpeg.encode_jpeg(np.asarray(wide), 95, colorsubsampling=name)
        yield f"TurboJPEG, {name}", content, wide
    inks = np.ascontiguousarray(255 - np.asarray(cmyk))
    for name in ("444", "420"):
        yield f"YCCK, {name}", simplejpeg.encode_jpeg(inks, 95, "CMYK", name), cmyk
    named = encode(rgb, "JPEG", quality=95, keep_rgb=True)
    numbered = named.replace(b"R\x11\0G\x11\0B\x11\0", b"\1\x11\0\2\x11\0\3\x11\0")
    numbered = numbered.replace(b"R\0G\0B\0", b"\1\0\2\0\3\0")
    yield "RGB by its components' names", without(named, 0xEE), rgb
    yield "RGB by Adobe's marker", numbered, rgb
    yield "RGB by Adobe's marker after EXIF's", markers_after_start(numbered, exif(3)), rgb


JFIF = segment(0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0")


def _pngs() -> Iterator[tuple[str, bytes, Image.Image]]:
    """Yield name, content and expected picture of PNG files."""
    rgb, grey = picture(), picture("L")
    palette = picture("P")
    eight = {
        0: np.asarray(grey)[..., None],
        2: np.asarray(rgb),
        3: np.asarray(palette)[..., None],
        4: np.stack([np.asarray(grey), np.asarray(grey) // 2], -1),
        6: np.dstack([np.asarray(rgb), np.asarray(grey)]),
    }
    names = {0: "grey", 2: "RGB", 3: "palette", 4: "grey and alpha", 6: "RGBA"}
    depths = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
    table = np.frombuffer(bytes(palette.palette.palette), np.uint8).reshape(-1, 3)
    for colours, levels in eight.items():
        for bits in depths[colours]:
            shown = levels >> 8 - bits if bits < 8 else levels
            samples = shown.astype(int) * 257 if bits == 16 else shown
            extra: list[list[bytes]] = [[]]
            if colours == 3:
                shown = levels % min(2**bits, len(table))
                samples = shown
                first = chunk(b"PLTE", table[: 2**bits].tobytes())
                extra = [[first], [first, chunk(b"tRNS", bytes([0, 128]))]]
                expected = Image.fromarray(table[shown[..., 0]])
            else:
                scaled = shown[..., : 1 if colours in (0, 4) else 3]
                scaled = np.rint(scaled * (255 / (2**bits - 1)) if bits < 8 else scaled)
                expected = Image.fromarray(scaled.astype(np.uint8).squeeze())
                if colours in (0, 2):
                    clear = samples[0, 0].astype(">u2").tobytes()
                    extra = [[], [chunk(b"tRNS", clear)]]
            for chunks in extra:
                for interlaced in (False, True):
                    name = f"PNG, {names[colours]}, {bits} bits" + ", interlaced" * interlaced
                    name += ", tRNS" if chunks and b"tRNS" in chunks[-1] else ""
                    content = png(samples, bits, colours, *chunks, interlaced=interlaced)
                    yield name, content, expected
    dark = chunk(b"gAMA", struct.pack(">I", 100_000))
    yield "PNG with a gamma", png(eight[2], 8, 2, dark), rgb
    turned = chunk(b"eXIf", exif(6)[10:])
    yield "PNG with an orientation", png(eight[2], 8, 2, turned), rgb


def _others() -> Iterator[tuple[str, bytes, Image.Image]]:
    """Yield name, content and expected picture of other files by Pillow."""
    rgb, clear = picture(), picture()
    clear.putalpha(picture("L"))
    exif_6 = exif(6)[4:]
    yield "WebP, lossless", encode(rgb, "WEBP", lossless=True), rgb
    yield "WebP, lossy", encode(rgb, "WEBP", quality=95), rgb
    yield "WebP, alpha", encode(clear, "WEBP", lossless=True, exact=True), rgb
    yield "WebP, lossy, alpha", encode(clear, "WEBP", quality=95, exact=True), rgb
    yield "WebP with an orientation", encode(rgb, "WEBP", lossless=True, exif=exif_6), rgb
    more = {"save_all": True, "append_images": [ImageChops.invert(rgb)]}
    yield "WebP, animated", encode(rgb, "WEBP", lossless=True, **more), rgb
    for mode in ("1", "L", "P", "RGB", "RGBA"):
        image = clear if mode == "RGBA" else picture(mode)
        yield f"BMP, {mode}", encode(image, "BMP"), image
    yield "GIF", encode(picture("P"), "GIF"), picture("P")
    yield "GIF, animated", encode(picture("P"), "GIF", **more), picture("P")


def corpus() -> dict[str, tuple[bytes, Image.Image]]:
    """Return content and expected picture of each file, by what is special about it."""
    found = [*_jpegs(), *_pngs(), *_others()]
    return {name: (content, expected.convert("RGB")) for name, content, expected in found}
