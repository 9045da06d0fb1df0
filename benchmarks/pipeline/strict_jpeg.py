"""What is found by a decoder that checks all that ITU T.81 demands of the pixels of a JPEG file.

libjpeg does not check that the coefficients of a block fit into it, nor the bits that fill the last
byte. This decoder does, in Python, at a tenth of a second for a photograph. Damage that it does not
find leaves a valid file: no decoder could find it, but by looking at the picture.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

import numpy as np

_LARGEST_MEAN = 1024 + 76  # of a block, times 8 and without its offset, with room for rounding


class InvalidJpegError(ValueError):
    """Raised for a sequential JPEG file that breaks a rule of the format."""


@dataclass
class _Headers:
    """The segments before the pixels, which start at ``pixels``."""

    steps: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    size: tuple[int, int] = (0, 0)
    components: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    interval: int = 0
    scan: list[tuple[int, int, int]] = field(default_factory=list)
    pixels: int = 0


def check(content: bytes) -> None:
    """Check a JPEG file whose pixels are in one sequential scan.

    Raises:
        InvalidJpegError: It breaks a rule of the format.
    """
    try:
        _check_pixels(content, _headers(content))
    except (IndexError, KeyError, struct.error, ValueError) as error:
        raise InvalidJpegError(str(error)) from error


def _headers(content: bytes) -> _Headers:
    found, at = _Headers(), 2
    while True:
        if content[at] != 0xFF:
            raise InvalidJpegError("bytes between segments")
        marker, end = content[at + 1], at + 2 + int.from_bytes(content[at + 2 : at + 4])
        body = content[at + 4 : end]
        if marker == 0xFF:
            at += 1
            continue
        if marker == 0xDB:
            while body:
                wide = body[0] >> 4
                steps = np.frombuffer(body[1 : 65 + 64 * wide], ">u2" if wide else "u1")
                if len(steps) != 64 or not steps.all():
                    raise InvalidJpegError("a quantization table has a step of zero")
                found.steps[body[0] & 15] = int(steps[0])
                body = body[65 + 64 * wide :]
        elif marker == 0xC4:
            while body:
                values = 17 + sum(body[1:17])
                found.tables[body[0]] = _table(body[1:17], body[17:values])
                body = body[values:]
        elif marker in (0xC0, 0xC1):
            height, width, count = struct.unpack(">HHB", body[1:6])
            found.size = width, height
            for i in range(6, 6 + 3 * count, 3):
                found.components[body[i]] = body[i + 1] >> 4, body[i + 1] & 15, body[i + 2]
        elif marker == 0xDD:
            found.interval = int.from_bytes(body[:2])
        elif marker == 0xDA:
            found.scan = [
                (body[i], body[i + 1] >> 4, body[i + 1] & 15) for i in range(1, 2 * body[0], 2)
            ]
            found.pixels = end
            return found
        at = end


def _table(counts: bytes, values: bytes) -> list[int]:
    """Return length and value of the code that begins each 16 bits, as length x 256 + value."""
    found, code, at = np.zeros(1 << 16, int), 0, 0
    for length, count in enumerate(counts, 1):
        for value in values[at : at + count]:
            found[code << 16 - length : code + 1 << 16 - length] = length << 8 | value
            code += 1
        at += count
        code <<= 1
    return found.tolist()


def _check_pixels(content: bytes, headers: _Headers) -> None:
    pixels = content[headers.pixels : content.rindex(b"\xff\xd9")]
    parts = re.split(rb"\xff+[\xd0-\xd7]", pixels) if headers.interval else [pixels]
    if any(re.search(rb"\xff[^\0]", part) for part in parts):
        raise InvalidJpegError("a marker within the pixels")
    wide, high, _ = (max(values) for values in zip(*headers.components.values(), strict=True))
    sampled = len(headers.scan) > 1
    width, height = (
        -(-side // (8 * most if sampled else 8))
        for side, most in zip(headers.size, (wide, high), strict=True)
    )
    blocks = []
    for name, first, others in headers.scan:
        h, v, steps = headers.components[name]
        block = name, headers.steps[steps], headers.tables[first], headers.tables[16 | others]
        blocks += [block] * (h * v if sampled else 1)
    left = width * height
    for part in parts:
        count = min(headers.interval or left, left)
        left -= count
        _check_part(part.replace(b"\xff\0", b"\xff"), blocks, count)
    if left:
        raise InvalidJpegError("restarts are missing")


def _check_part(part: bytes, blocks: list[tuple[int, int, list[int], list[int]]], n: int) -> None:
    """Check ``n`` groups of blocks, up to a restart or the end."""
    padded = np.frombuffer(part + bytes(8), np.uint8).astype(np.uint64)
    windows = sum(padded[i : len(padded) - 4 + i] << np.uint64(32 - 8 * i) for i in range(5))
    ahead, at = windows.tolist(), 0  # the next 40 bits from each byte on
    means = {name: 0 for name, *_ in blocks}
    for name, step, first, others in blocks * n:
        found = first[ahead[at >> 3] >> 24 - (at & 7) & 0xFFFF]
        at, size = at + (found >> 8), found & 255
        if not found or size > 11:
            raise InvalidJpegError("no such code")
        if size:
            value = ahead[at >> 3] >> 40 - (at & 7) - size & (1 << size) - 1
            means[name] += value if value >> size - 1 else value - (1 << size) + 1
            at += size
            if abs(means[name]) * step > 8 * (_LARGEST_MEAN // 8) + step:
                raise InvalidJpegError("a block is brighter or darker than any")
        place = 0
        while place < 63:
            found = others[ahead[at >> 3] >> 24 - (at & 7) & 0xFFFF]
            at, run, size = at + (found >> 8), found >> 4 & 15, found & 15
            if not size and run not in (0, 15):
                raise InvalidJpegError("no such code")
            if not size and not run:
                if not found:
                    raise InvalidJpegError("no such code")
                break
            place += run + 1
            at += size
            if place > 63 or (not size and place == 63):
                raise InvalidJpegError("a block has more than 64 coefficients")
        if at > 8 * len(part):
            raise InvalidJpegError("bits are missing")
    spare = 8 * len(part) - at
    if spare > 7 or (part[-1:] and part[-1] & (1 << spare) - 1 != (1 << spare) - 1):
        raise InvalidJpegError("bits are left")
