"""Metadata does not decide whether an image is usable, nor what its pixels are."""

import io
import itertools
import struct

import numpy as np
import pytest
from PIL import Image

from largebatch.pipeline.decode.pillow import check_header, decode
from largebatch.pipeline.prepare.shrink import shrink
from tests.pipeline.decode.corpus import chunk, corpus, encode, segment

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8))
HEADS = (  # what Pillow parses, up to the bytes that follow
    *(b"Exif\0\0II*\0\x08\0\0\0", b"Exif\0\0MM\0*", b"http://ns.adobe.com/xap/1.0/\0"),
    *(b"ICC_PROFILE\0\1\1", b"MPF\0II*\0\x08\0\0\0", b"FPXR\0", b"Photoshop 3.0\x008BIM\x03\xed"),
    *(b"", b"a\0", b"a\0\0", b"comment\0", b"XML:com.adobe.xmp\0\0\0\0\0"),
)
MARKERS = (0xE1, 0xE2, 0xE3, 0xEC, 0xED, 0xEF, 0xFE)
CHUNKS = (
    *(b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"iCCP", b"tIME", b"pHYs", b"gAMA", b"cHRM", b"sRGB"),
    *(b"hIST", b"bKGD", b"sBIT", b"sPLT", b"acTL", b"fcTL", b"prVt"),
)


def broken(kind, content):
    """A PNG chunk with a wrong checksum."""
    return chunk(kind, content)[:-1] + b"x"


JPEG, PNG = encode(NOISE, "JPEG"), encode(NOISE, "PNG")
RGB = corpus()["RGB by Adobe's marker"][0]  # which is no metadata
PALETTE = encode(NOISE.convert("P"), "PNG")


def pixels(function, content):
    return np.asarray(function(content)).tobytes()


def with_metadata():
    """Whole images, and the same with metadata that nothing can read, by what was added."""
    for plain, marker, head in itertools.product((JPEG, RGB), MARKERS, HEADS):
        for content in (head, head + NOISE.tobytes()[:70]):
            yield (marker, content), plain, plain[:2] + segment(marker, content) + plain[2:]
    for plain, kind, make in itertools.product((PNG, PALETTE), CHUNKS, (chunk, broken)):
        for head in (*HEADS[:2], b"a\0\0", b"x" * 9):
            for at in (33, len(plain) - 12):  # behind IHDR, before IEND
                yield (kind, head), plain, plain[:at] + make(kind, head) + plain[at:]


@pytest.mark.filterwarnings("ignore")  # Pillow's about broken metadata
def test_pixels_do_not_depend_on_metadata():
    def shrunk(content):
        return Image.open(io.BytesIO(shrink(content, 20, 90)))

    def read(content):
        check_header(np.frombuffer(content, np.uint8))
        return decode(np.frombuffer(content, np.uint8))

    wanted = {
        plain: [pixels(f, plain) for f in (shrunk, read)] for plain in (JPEG, RGB, PNG, PALETTE)
    }
    for added, plain, other in with_metadata():
        assert [pixels(f, other) for f in (shrunk, read)] == wanted[plain], added


ORIENTATIONS = {  # TIFF type and value
    "valid": (3, struct.pack("<HH", 6, 0), 6),
    "long": (4, struct.pack("<I", 6), 6),
    "zero": (3, bytes(4), None),
    "nine": (3, struct.pack("<HH", 9, 0), None),
    "ascii": (2, b"6\0\0\0", None),
    "huge": (4, struct.pack("<I", 4_000_000_000), None),
    "not a number": (11, struct.pack("<f", float("nan")), None),
    "negative": (9, struct.pack("<i", -1), None),
}


@pytest.mark.parametrize(("kind", "value", "kept"), ORIENTATIONS.values(), ids=ORIENTATIONS)
def test_only_a_valid_orientation_is_kept(kind, value, kept):
    count = 4 if kind == 2 else 1
    exif = b"Exif\0\0II*\0" + struct.pack("<IHHHI", 8, 1, 0x0112, kind, count) + value + bytes(4)
    small = shrink(JPEG[:2] + segment(0xE1, exif) + JPEG[2:], 20, 90)
    with Image.open(io.BytesIO(small)) as image:
        assert image.getexif().get(0x0112) == kept


def test_other_metadata_is_dropped():
    profile, comment = b"ICC_PROFILE\0\1\1" + bytes(200), b"x" * 70_000
    jpeg = JPEG[:2] + segment(0xE2, profile) + segment(0xFE, b"a comment") + JPEG[2:]
    png = PNG[:33] + chunk(b"tEXt", b"comment\0" + comment) + PNG[33:]  # too long for JPEG
    assert shrink(jpeg, 20, 90) == shrink(JPEG, 20, 90)
    assert shrink(png, 20, 90) == shrink(PNG, 20, 90)
