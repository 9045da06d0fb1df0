"""Damage to PNG files, found by their checksums.

Decoders stop reading once they have the pixels, so that they do not compare all checksums, and
some go on after a wrong one. The format is that of https://www.w3.org/TR/png-3/: chunks, each with
a CRC-32, of which those named IDAT hold a zlib stream with a checksum of its own.
"""

from __future__ import annotations

import zlib

from ..sources import Encoded

SIGNATURE = b"\x89PNG\r\n\x1a\n"

_PIECE_BYTES = 1 << 20
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
# The passes of interlaced images: first column and row, and the distance to the next.
_ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)


def png_damage(content: Encoded) -> str | None:
    """Return the first damage to a PNG file that Pillow can decode; None if there is none."""
    data = content.data
    at = len(SIGNATURE)
    pixels = _Pixels()
    while at + 12 <= len(data):
        kind = bytes(data[at + 4 : at + 8])
        end = at + 8 + int.from_bytes(data[at : at + 4])
        name = f"the chunk {kind.decode('ascii', 'backslashreplace')!r} at byte {at:,}"
        if end + 4 > len(data):
            return f"{name} is truncated"
        if zlib.crc32(data[at + 4 : end]) != int.from_bytes(data[end : end + 4]):
            return f"{name} has another CRC-32 than it states"
        body = bytes(data[at + 8 : end])
        if kind == b"IHDR":
            pixels.wanted = _pixel_bytes(body)
        elif kind == b"IDAT":
            try:
                pixels.add(body)
            except zlib.error as error:
                return f"its compressed pixels are invalid ({error})"
        elif kind == b"IEND":
            return pixels.fault()
        at = end + 4
    return "its end is missing (chunk IEND)"


class _Pixels:
    """Counts the bytes of an image's pixels.

    Attributes:
        wanted: Number of bytes by the header.
        found: Number of bytes that were compressed, as far as counted.
    """

    def __init__(self) -> None:
        self.wanted = 0
        self.found = 0
        self._stream = zlib.decompressobj()

    def add(self, compressed: bytes) -> None:
        """Decompress a chunk, though no further than a little beyond the wanted bytes."""
        while not self._stream.eof and self.found <= self.wanted:
            piece = self._stream.decompress(compressed, _PIECE_BYTES)
            self.found += len(piece)
            compressed = self._stream.unconsumed_tail
            if not compressed and len(piece) < _PIECE_BYTES:
                break

    def fault(self) -> str | None:
        """Return what is wrong with the pixels at the end of the file."""
        if self.found == self.wanted and self._stream.eof:
            return None
        if self.found == self.wanted:
            return "its compressed pixels have no end"
        more = "more" if self.found > self.wanted else "fewer"
        return f"it holds {more} pixels than its header states"


def _pixel_bytes(header: bytes) -> int:
    """Return the number of bytes of all rows, each with the byte that names its filter."""
    width, height = int.from_bytes(header[:4]), int.from_bytes(header[4:8])
    bits = header[8] * _CHANNELS[header[9]]
    interlaced = header[12] == 1
    total = 0
    for x, y, dx, dy in _ADAM7 if interlaced else ((0, 0, 1, 1),):
        columns, rows = -((x - width) // dx), -((y - height) // dy)
        if columns > 0:
            total += max(rows, 0) * (1 + (columns * bits + 7) // 8)
    return total
