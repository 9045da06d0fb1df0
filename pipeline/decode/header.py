"""Facts about an encoded image from its headers: its size, its colours and whether it is complete.

The size of every training image is needed once per epoch to place its crop. JPEG headers are
therefore parsed here, since Pillow takes ten times as long to open a file; Pillow opens all other
formats.
"""

from __future__ import annotations

from ..sources import Encoded
from .pillow import with_image
from .segments import END_MARKER, START_OF_SCAN, chunks, is_jpeg, is_png, markers, segments

# The start-of-frame markers; C4, C8 and CC in that range mean something else.
_START_OF_FRAME = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
_QUANTIZATION = 0xDB
_COEFFICIENTS = 64
END_OF_IMAGE = b"\xff\xd9"


def image_size(content: Encoded) -> tuple[int, int]:
    """Return width and height in pixels as stored, not as EXIF turns it, or raise ValueError."""
    data = content.data
    for marker, at, _ in segments(content) if is_jpeg(content) else ():
        if marker in _START_OF_FRAME:
            height, width = data[at + 1] << 8 | data[at + 2], data[at + 3] << 8 | data[at + 4]
            if width and height:
                return width, height
            break
    return with_image(content, lambda image: image.size)


def needs_reference(content: Encoded) -> bool:
    """Whether an image goes through the reference decoder, whatever the back end.

    - Formats but JPEG, whole PNG, BMP and simple WebP: DALI 2.4 crashes where its parser refuses an
      image (GIF, WebP with metadata, PNG without its last chunk) in a batch with others, which its
      threads go on to decode.
    - JPEG in other colours than grey and YCbCr: without Adobe's marker, decoders take four
      components for plain or for inverted CMYK as they like. Three are RGB by the rules of libjpeg
      (``default_decompress_parms``): by Adobe's marker or by their names, unless JFIF's marker says
      YCbCr.
    """
    if is_png(content):
        return all(kind != b"IEND" for kind, _, _ in chunks(content))
    if not is_jpeg(content):
        start = content[:16].tobytes()
        simple_webp = start[:4] == b"RIFF" and start[12:] in (b"VP8 ", b"VP8L")
        return not (simple_webp or start.startswith(b"BM"))
    data = content.data
    is_jfif, transform, names = False, None, b""
    for marker, at, end in segments(content):
        if marker == 0xE0:
            is_jfif |= bytes(data[at : at + 5]) == b"JFIF\0"
        elif marker == 0xEE and bytes(data[at : at + 5]) == b"Adobe" and end - at >= 12:
            transform = data[at + 11]
        elif marker in _START_OF_FRAME:
            names = bytes(data[at + 6 : at + 6 + 3 * data[at + 5] : 3])
        elif marker == START_OF_SCAN:
            break
    if len(names) != 3 or is_jfif:
        return len(names) not in (1, 3)
    return names == b"RGB" if transform is None else transform == 0


def misses_scans(content: Encoded) -> bool:
    """Whether a valid JPEG file ends before it has sent all bits of all coefficients.

    This concerns files in several scans, nearly all of them progressive: cut between two scans and
    ended by an end marker, they are valid, and decode to a blurred or colourless picture.
    """
    data = content.data
    missing: dict[int, list[int]] = {}  # by component: bits of each coefficient not yet sent
    sequential = True
    for marker, at, end in segments(content):
        if marker in _START_OF_FRAME:
            sequential = marker not in _PROGRESSIVE
            missing = {data[at + 6 + 3 * i]: [-1] * _COEFFICIENTS for i in range(data[at + 5])}
        elif marker == START_OF_SCAN:
            count = data[at]
            if sequential and count == len(missing):
                return False
            first, last, bits = data[end - 3], data[end - 2], data[end - 1] & 15
            for i in range(count):
                of_component = missing[data[at + 1 + 2 * i]]
                of_component[first : last + 1] = [bits] * (last + 1 - first)
    return any(any(bits) for bits in missing.values())


def end_of_only_scan(content: Encoded) -> int | None:
    """Return where the pixels of a JPEG file's only scan end; None if it has several or no end."""
    for marker, _, at in segments(content):
        if marker == START_OF_SCAN:
            ends = markers(content)
            later = ends[ends >= at]
            if not len(later) or content[later[0] + 1] != END_MARKER:
                return None
            end = int(later[0])
            while end > at and content[end - 1] == 0xFF:  # fill bytes may precede a marker
                end -= 1
            return end
    return None


def with_half_contrast(content: Encoded) -> tuple[Encoded, float]:
    """Return a JPEG file whose blocks differ from grey half as much, and the most that any may.

    Only the step of each quantization table by which means of blocks are multiplied is changed. A
    mean that a damaged difference has made brighter than white or darker than black is then seen,
    as more than the number of levels returned from 128 in the first component.
    """
    changed, steps, table = content.copy(), {}, -1
    for marker, at, end in segments(content):
        if marker == _QUANTIZATION:
            while at < end:
                wide = int(content[at]) >> 4
                step = changed[at + 1 : at + 2 + wide].view(">u2" if wide else "u1")
                before = int(step[0])
                step[0] = (before + 1) // 2
                steps[int(content[at]) & 15] = before, int(step[0])
                at += 65 + 64 * wide
        elif marker in _START_OF_FRAME:
            table = int(content[at + 8])
        elif marker == START_OF_SCAN:
            break
    before, after = steps.get(table, (0, 1))
    # An encoder rounds to half a step, which is a sixteenth of a level; a decoder rounds once more.
    return changed, (128 + before / 16) * after / before + 1 if before else 0.0
