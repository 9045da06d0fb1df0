"""Metadata does not decide whether an image is usable, nor what its pixels are."""

import io
import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from largebatch.pipeline.decode.pillow import check_header, decode
from largebatch.pipeline.prepare.shrink import shrink
from tests.pipeline.decode.corpus import chunk, encode, segment

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
CMYK, PALETTE = encode(NOISE.convert("CMYK"), "JPEG"), encode(NOISE.convert("P"), "PNG")
TRNS = PALETTE.index(b"IDAT") - 4  # Adobe's marker and transparency are no metadata
CLEAR = PALETTE[:TRNS] + chunk(b"tRNS", bytes(range(0, 250, 5))) + PALETTE[TRNS:]
SOME = st.builds(lambda head, tail: head + tail, st.sampled_from(HEADS), st.binary(max_size=80))
SEGMENTS = st.lists(st.builds(segment, st.sampled_from(MARKERS), SOME), min_size=1, max_size=3)
CHUNK = st.sampled_from([chunk, broken]).flatmap(
    lambda make: st.builds(make, st.sampled_from(CHUNKS), SOME)
)


@st.composite
def with_metadata(draw):
    """A whole image and the same with metadata that nothing can read; both cut short or neither."""
    plain = draw(st.sampled_from([JPEG, JPEG, CMYK, PNG, PNG, CLEAR]))
    if plain in (JPEG, CMYK):
        at, added = 2, b"".join(draw(SEGMENTS))
    else:
        at = draw(st.sampled_from([33, len(plain) - 12]))  # behind IHDR, before IEND
        added = b"".join(draw(st.lists(CHUNK, min_size=1, max_size=3)))
    lost = draw(st.sampled_from([0, 0, 60, len(plain) - at - 20])) if at < 40 else 0
    end = len(plain) - lost
    return plain[:end], plain[:at] + added + plain[at:end]


def pixels(function, content):
    """The pixels that come of an image, or None where it is refused."""
    try:
        return np.asarray(function(content)).tolist()
    except ValueError:
        return None


@pytest.mark.filterwarnings("ignore")  # Pillow's about broken metadata
@given(with_metadata())
@example((CMYK, CMYK[:2] + segment(0xED, b"Photoshop 3.0\x008BIM\x03\xed\0\0\0\0") + CMYK[2:]))
@example((CLEAR, CLEAR[:33] + chunk(b"pHYs", b"x") + CLEAR[33:]))
@example((PNG, PNG[:33] + chunk(b"eXIf", b"Exif\0\0MM\0*") + PNG[33:]))
def test_pixels_do_not_depend_on_metadata(images):
    def shrunk(content):
        return Image.open(io.BytesIO(shrink(content, 20, 90)))

    def read(content):
        check_header(np.frombuffer(content, np.uint8))
        return decode(np.frombuffer(content, np.uint8))

    plain, other = images
    for function in (shrunk, read):
        assert pixels(function, other) == pixels(function, plain)
    assert (pixels(shrunk, plain) is None) == (pixels(read, plain) is None)


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
