"""Kinds of damage to encoded images, each a function of the file's bytes and a random generator."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image

Mutation = Callable[[bytes, np.random.Generator], bytes]

END = b"\xff\xd9"
_BLOCK = 512
_MARKERS = (0xC0, 0xD0, 0xD3, 0xD9, 0xDA, 0xDD)  # a frame, restarts, the end, a scan, an interval


def _pixels(content: bytes) -> tuple[int, int]:
    """Return where the pixels of a JPEG file begin and end, with the headers of further scans."""
    at = 2
    while content[at + 1] != 0xDA:
        at += 2 + int.from_bytes(content[at + 2 : at + 4])
    return at + 2 + int.from_bytes(content[at + 2 : at + 4]), content.rindex(END)


def _block(begin: int, end: int) -> int:
    return min(_BLOCK, (end - begin) // 4)


def _replaced(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


def _flipped(content: bytes, at: int, rng: np.random.Generator) -> bytes:
    return _replaced(content, at, bytes([content[at] ^ 1 << int(rng.integers(8))]))


def _flip_pixels(content: bytes, rng: np.random.Generator) -> bytes:
    return _flipped(content, int(rng.integers(*_pixels(content))), rng)


def _flip_headers(content: bytes, rng: np.random.Generator) -> bytes:
    return _flipped(content, int(rng.integers(2, _pixels(content)[0])), rng)


def _overwrite(content: bytes, rng: np.random.Generator) -> bytes:
    begin, end = _pixels(content)
    return _replaced(content, int(rng.integers(begin, end - 16)), rng.bytes(16))


def _zero(content: bytes, rng: np.random.Generator) -> bytes:
    begin, end = _pixels(content)
    count = _block(begin, end)
    return _replaced(content, int(rng.integers(begin, end - count)), bytes(count))


def _truncate(content: bytes, rng: np.random.Generator) -> bytes:
    return content[: int(rng.integers(*_pixels(content)))]


def _truncate_and_end(content: bytes, rng: np.random.Generator) -> bytes:
    return _truncate(content, rng) + END


def _zero_tail(content: bytes, rng: np.random.Generator) -> bytes:
    cut = _truncate(content, rng)
    return cut + bytes(len(content) - len(cut))


def _zero_tail_and_end(content: bytes, rng: np.random.Generator) -> bytes:
    return _zero_tail(content, rng)[: -len(END)] + END


def _swap(content: bytes, rng: np.random.Generator) -> bytes:
    begin, end = _pixels(content)
    count, middle = _block(begin, end), (begin + end) // 2
    one = int(rng.integers(begin, middle - count))
    two = int(rng.integers(middle, end - count))
    changed = _replaced(content, one, content[two : two + count])
    return _replaced(changed, two, content[one : one + count])


def _remove(content: bytes, rng: np.random.Generator) -> bytes:
    begin, end = _pixels(content)
    count = _block(begin, end)
    at = int(rng.integers(begin, end - count))
    return content[:at] + content[at + count :]


def _insert_marker(content: bytes, rng: np.random.Generator) -> bytes:
    begin, end = _pixels(content)
    return _replaced(
        content, int(rng.integers(begin, end - 2)), bytes([0xFF, rng.choice(_MARKERS)])
    )


def _end_between_scans(content: bytes, rng: np.random.Generator) -> bytes:
    """End a progressive file after some of its scans, without the tables of the next one."""
    begin, end = _pixels(content)
    starts = [at for at in range(begin, end) if content[at : at + 2] in (b"\xff\xc4", b"\xff\xda")]
    # A scan follows its tables, so that pixels lie before a table or before a scan without one.
    ends = [at for at in starts if content[at + 1] == 0xC4]
    return content[: int(rng.choice(ends))] + END


#: Damage to JPEG files.
JPEG: dict[str, Mutation] = {
    "one bit flipped in the pixels": _flip_pixels,
    "one bit flipped in the headers": _flip_headers,
    "16 bytes overwritten at random": _overwrite,
    "512 bytes zeroed": _zero,
    "512 bytes missing": _remove,
    "two blocks of 512 bytes swapped": _swap,
    "a marker written into the pixels": _insert_marker,
    "truncated": _truncate,
    "truncated, and an end marker appended": _truncate_and_end,
    "zeroed from somewhere to the end": _zero_tail,
    "zeroed from somewhere to the end marker": _zero_tail_and_end,
}

#: Damage to progressive JPEG files.
PROGRESSIVE: dict[str, Mutation] = {
    "progressive, truncated, and an end marker appended": _truncate_and_end,
    "progressive, ended between two scans": _end_between_scans,
}


def _chunks(content: bytes) -> list[tuple[int, int, bytes]]:
    """Return begin, end and kind of each chunk of a PNG file."""
    at, found = 8, []
    while at < len(content):
        end = at + 12 + int.from_bytes(content[at : at + 4])
        found.append((at, end, content[at + 4 : at + 8]))
        at = end
    return found


def _png_pixels(content: bytes) -> tuple[int, int]:
    """Return where the compressed pixels of a PNG file begin and end."""
    chunks = [chunk for chunk in _chunks(content) if chunk[2] == b"IDAT"]
    return chunks[0][0] + 8, chunks[-1][1] - 4


def _png_flip(content: bytes, rng: np.random.Generator) -> bytes:
    return _flipped(content, int(rng.integers(*_png_pixels(content))), rng)


def _png_flip_and_crc(content: bytes, rng: np.random.Generator) -> bytes:
    """Flip a bit of the pixels before the CRC-32 is computed, as a defective memory would."""
    chunks = [chunk for chunk in _chunks(content) if chunk[2] == b"IDAT"]
    begin, end, _ = chunks[int(rng.integers(len(chunks)))]
    changed = _flipped(content, int(rng.integers(begin + 8, end - 4)), rng)
    crc = zlib.crc32(changed[begin + 4 : end - 4])
    return _replaced(changed, end - 4, crc.to_bytes(4))


def _png_zero(content: bytes, rng: np.random.Generator) -> bytes:
    begin, end = _png_pixels(content)
    return _replaced(content, int(rng.integers(begin, end - _BLOCK)), bytes(_BLOCK))


def _png_truncate(content: bytes, rng: np.random.Generator) -> bytes:
    return content[: int(rng.integers(*_png_pixels(content)))]


def _png_zero_tail(content: bytes, rng: np.random.Generator) -> bytes:
    cut = _png_truncate(content, rng)
    return cut + bytes(len(content) - len(cut))


def _png_zero_end(content: bytes, rng: np.random.Generator) -> bytes:
    """Zero the end of the file from the name of its last chunk, or from before it."""
    count = int(rng.integers(5, 20))
    return content[:-count] + bytes(count)


def _png_without_chunk(content: bytes, rng: np.random.Generator) -> bytes:
    chunks = [chunk for chunk in _chunks(content) if chunk[2] == b"IDAT"]
    begin, end, _ = chunks[int(rng.integers(len(chunks)))]
    return content[:begin] + content[end:]


#: Damage to PNG files.
PNG: dict[str, Mutation] = {
    "PNG, one bit flipped in the pixels": _png_flip,
    "PNG, one bit flipped and its CRC-32 made right": _png_flip_and_crc,
    "PNG, 512 bytes zeroed": _png_zero,
    "PNG, a chunk of pixels missing": _png_without_chunk,
    "PNG, truncated": _png_truncate,
    "PNG, zeroed from somewhere to the end": _png_zero_tail,
    "PNG, its last 5 to 19 bytes zeroed": _png_zero_end,
}


def as_progressive(content: bytes) -> bytes:
    """Encode a photograph again, as a progressive JPEG file."""
    return _encoded(content, "JPEG", quality=90, progressive=True)


def as_png(content: bytes) -> bytes:
    """Encode a photograph again, as a PNG file."""
    return _encoded(content, "PNG")


def _encoded(content: bytes, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    with Image.open(io.BytesIO(content)) as image:
        image.convert("RGB").save(file, form, **options)
    return file.getvalue()
