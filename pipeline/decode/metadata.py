"""Images without their metadata, which does not decide whether their pixels are usable.

ITU-T T.81, B.1.1 (JPEG: marker segments), and the PNG specification, 5 (chunks).
"""

from __future__ import annotations

import struct

_SOI, _SOS = b"\xff\xd8", 0xDA
# APP0 (JFIF) and APP14 (Adobe) say how colours are stored.
_JPEG_METADATA = {0xFE, *range(0xE1, 0xEE), 0xEF}
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_FRAME = 12  # bytes of length, type and checksum of a chunk


def without_metadata(content: bytes) -> bytes:
    """Remove the metadata of a JPEG or PNG file; its pixels stay the same.

    Of JPEG files, these are comments and all application segments but JFIF's and Adobe's; of PNG
    files, all ancillary chunks but the transparency. Other formats are returned as they are.
    """
    if content.startswith(_SOI):
        return _bare_jpeg(content)
    if content.startswith(_PNG):
        return _bare_png(content)
    return content


def _bare_jpeg(content: bytes) -> bytes:
    kept, at = [_SOI], len(_SOI)
    while at + 4 <= len(content) and content[at] == 0xFF:
        marker = content[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        end = at + 2 + int.from_bytes(content[at + 2 : at + 4])
        if marker == _SOS:
            break
        if marker not in _JPEG_METADATA:
            kept.append(content[at:end])
        at = end
    return b"".join([*kept, content[at:]])


def _bare_png(content: bytes) -> bytes:
    kept, at = [_PNG], len(_PNG)
    while at + _PNG_FRAME <= len(content):
        length, kind = struct.unpack_from(">I4s", content, at)
        end = at + _PNG_FRAME + length
        if kind[:1].isupper() or kind == b"tRNS":
            kept.append(content[at:end])
        at = end
    return b"".join([*kept, content[at:]])
