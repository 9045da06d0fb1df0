"""Pictures in the forms that people's files have, each made when it is asked for.

JPEG files in forms that Pillow does not write are made by a small baseline encoder whose blocks
are flat: it sends no coefficient but the mean, with the Huffman tables that Pillow writes (ITU
T.81, annexes B, F and K).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops

from benchmarks.pipeline.odd_images import encode

Sampling = Sequence[tuple[int, int]]

#: Horizontal and vertical sampling factors of the components of valid JPEG files.
SAMPLINGS: dict[str, Sampling] = {
    "4:4:4": [(1, 1), (1, 1), (1, 1)],
    "4:4:4 as 2x1": [(2, 1), (2, 1), (2, 1)],
    "4:2:2": [(2, 1), (1, 1), (1, 1)],
    "4:2:2 as 2x2": [(2, 2), (1, 2), (1, 2)],
    "4:2:0": [(2, 2), (1, 1), (1, 1)],
    "4:4:0": [(1, 2), (1, 1), (1, 1)],
    "4:1:1": [(4, 1), (1, 1), (1, 1)],
    "4:4:1": [(1, 4), (1, 1), (1, 1)],
    "4x2": [(4, 2), (1, 1), (1, 1)],
    "2x4": [(2, 4), (1, 1), (1, 1)],
    "3x1": [(3, 1), (1, 1), (1, 1)],
    "1x3": [(1, 3), (1, 1), (1, 1)],
    "3x2": [(3, 2), (1, 1), (1, 1)],
    "2x2/1x2/1x1": [(2, 2), (1, 2), (1, 1)],
    "1x1/2x1/2x1": [(1, 1), (2, 1), (2, 1)],
    "2x2/2x1/1x2": [(2, 2), (2, 1), (1, 2)],
    "grey as 2x2": [(2, 2)],
}


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


def flat_jpeg(
    planes: Sequence[NDArray[np.uint8]],
    sampling: Sampling,
    extra: bytes = b"",
    names: bytes = b"\1\2\3\4",
) -> bytes:
    """Encode a JPEG file of flat blocks, without JFIF's marker, with ``extra`` segments.

    The planes hold the mean of each 8 x 8 pixels of each component, ``[rows, columns]``.
    """
    widest, highest = (max(factors) for factors in zip(*sampling, strict=True))
    rows, columns = planes[0].shape
    # The blocks of an only component are sent row by row, whatever its factors.
    blocks = sampling if len(planes) > 1 else [(1, 1)]
    wide, high = (max(factors) for factors in zip(*blocks, strict=True))
    bits, before = [], [0] * len(planes)
    for y, x in np.ndindex(-(-rows // high), -(-columns // wide)):
        for i, (plane, (h, v)) in enumerate(zip(planes, blocks, strict=True)):
            for v_at, h_at in np.ndindex(v, h):
                row = min((y * v + v_at) * highest // sampling[i][1], rows - 1)
                column = min((x * h + h_at) * widest // sampling[i][0], columns - 1)
                level = int(plane[row, column]) - 128
                bits.append(_block(level - before[i]))
                before[i] = level
    joined = "".join(bits)
    joined += "1" * (-len(joined) % 8)
    pixels = int(joined, 2).to_bytes(len(joined) // 8).replace(b"\xff", b"\xff\0")
    frame = struct.pack(">BHHB", 8, 8 * rows, 8 * columns, len(planes))
    frame += b"".join(bytes([names[i], h << 4 | v, 0]) for i, (h, v) in enumerate(sampling))
    scan = bytes([len(planes)]) + b"".join(bytes([name, 0]) for name in names[: len(planes)])
    return b"".join(
        [
            b"\xff\xd8",
            extra,
            segment(0xDB, b"\0" + bytes([8] * 64)),  # a step of 8 is one level of a block's mean
            # The number of bits of a difference in 4 bits; the end of a block in one.
            segment(0xC4, b"\0" + bytes([0, 0, 0, 12] + [0] * 12) + bytes(range(12))),
            segment(0xC4, b"\x10" + bytes([1] + [0] * 15) + b"\0"),
            segment(0xC0, frame),
            segment(0xDA, scan + b"\0\x3f\0"),
            pixels,
            b"\xff\xd9",
        ]
    )


def _block(difference: int) -> str:
    """Return the bits of a block without coefficients, by the difference of its mean."""
    size = abs(difference).bit_length()
    value = difference if difference > 0 else difference + (1 << size) - 1
    return f"{size:04b}" + (f"{value:0{size}b}" if size else "") + "0"


def flat_picture(mode: str) -> list[NDArray[np.uint8]]:
    """Return components for :func:`flat_jpeg`: 2 x 3 patches of 12 x 12 blocks, so of any sampling.

    A decoder may smooth the colours at their edges.
    """
    patches = np.asarray(picture(mode, 3, 2)).reshape(2, 3, -1).repeat(12, 0).repeat(12, 1)
    return [patches[..., i] for i in range(patches.shape[2])]


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
    yield "CMYK, no markers", without(encode(cmyk, "JPEG", quality=95), 0xEE), cmyk
    for orientation in range(10):
        for order in "<>":
            marked = markers_after_start(without(plain, 0xE0), exif(orientation, order))
            yield f"EXIF orientation {orientation}{order}", marked, rgb
    yield "EXIF before JFIF", markers_after_start(plain, exif(6)), rgb
    for name, sampling in SAMPLINGS.items():
        planes = flat_picture("YCbCr" if len(sampling) > 1 else "L")
        yield f"sampling {name}", flat_jpeg(planes, sampling), flat_expected(planes)
    four = [*SAMPLINGS["4:4:4"], (1, 1)]
    subsampled = [(2, 2), (1, 1), (1, 1), (2, 2)]
    planes = flat_picture("RGB")
    for name, extra, names in [
        ("RGB by Adobe's marker", adobe(0), b"\1\2\3"),
        ("RGB by its components' names", b"", b"RGB"),
        ("RGB by Adobe's marker after EXIF's", exif(3) + adobe(0), b"\1\2\3"),
    ]:
        yield name, flat_jpeg(planes, four[:3], extra, names), flat_expected(planes, "RGB")
    planes = flat_picture("CMYK")
    inks = flat_expected(planes, "CMYK")
    inverted = [255 - plane for plane in planes]
    rgb = Image.fromarray(np.stack(planes[:3], -1)).convert("YCbCr")
    ycck = [*np.moveaxis(np.asarray(rgb), -1, 0), inverted[3]]
    for name, sampling in (("plain", four), ("subsampled", subsampled)):
        yield f"flat CMYK, Adobe, {name}", flat_jpeg(inverted, sampling, adobe(0)), inks
        yield f"flat CMYK, no markers, {name}", flat_jpeg(inverted, sampling), inks
        yield f"flat CMYK, JFIF, {name}", flat_jpeg(inverted, sampling, JFIF), inks
        yield f"flat YCCK, Adobe, {name}", flat_jpeg(ycck, sampling, adobe(2)), inks
        odd = "CMYK, Adobe's marker after EXIF's"
        yield f"{odd}, {name}", flat_jpeg(inverted, sampling, exif(8) + adobe(0)), inks


def flat_expected(planes: Sequence[NDArray[np.uint8]], mode: str = "") -> Image.Image:
    """Return the picture of a file by :func:`flat_jpeg`."""
    whole = np.stack(planes, -1).repeat(8, 0).repeat(8, 1)
    mode = mode or ("L" if len(planes) == 1 else "YCbCr")
    height, width = whole.shape[:2]
    return Image.frombytes(mode, (width, height), whole.tobytes())


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
