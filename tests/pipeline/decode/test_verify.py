"""Strict verification: damage that decoders pass over is found, unharmed images are not accused."""

import shutil
from base64 import b85decode

import numpy as np
import pytest
from PIL import Image

from benchmarks.pipeline.damaged_images import InMemory
from benchmarks.pipeline.mutations import JPEG, PNG, PROGRESSIVE
from benchmarks.pipeline.odd_images import encode
from largebatch.pipeline import Loader
from largebatch.pipeline.decode import reader
from largebatch.pipeline.decode.pillow import decode
from largebatch.pipeline.decode.verify import damage, verify
from tests.conftest import refused
from tests.pipeline.loaders import BACKENDS, SMALL, loader

#: Kinds of damage of which every example is found: what is lost reaches to the end of the file, or
#: is covered by a checksum.
CERTAIN = {
    "truncated",
    "truncated, and an end marker appended",
    "zeroed from somewhere to the end",
    "zeroed from somewhere to the end marker",
    *PROGRESSIVE,
    *PNG,
}


def array(content):
    return np.frombuffer(content, dtype=np.uint8)


def photograph(width=200, height=150, seed=0):
    """A picture with edges and noise, of which an encoder needs all coefficients."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
    ramp = np.linspace(0, 255, width)[None, :, None] > np.linspace(0, 255, height)[:, None, None]
    return Image.fromarray((noise // 3 + ramp * 150).astype(np.uint8))


ORIGINALS = {
    **dict.fromkeys(JPEG, encode(photograph(), "JPEG", quality=90)),
    **dict.fromkeys(PROGRESSIVE, encode(photograph(), "JPEG", quality=90, progressive=True)),
    **dict.fromkeys(PNG, encode(photograph(), "PNG")),
}
MUTATIONS = {**JPEG, **PROGRESSIVE, **PNG}
DAMAGED = r"^(is damaged|cannot be decoded): ."


@pytest.mark.parametrize("kind", MUTATIONS)
def test_damage_to_the_end_and_what_pillow_cannot_decode_is_always_found(kind):
    """Strict verification is no weaker than decoding, though it does not decode whole JPEGs."""
    for seed in range(30):
        damaged = array(MUTATIONS[kind](ORIGINALS[kind], np.random.default_rng(seed)))
        must_be_found = kind in CERTAIN
        try:
            decode(damaged)
        except ValueError:
            must_be_found = True
        if must_be_found:
            with pytest.raises(ValueError, match=DAMAGED):
                verify(damaged)


def test_jpegs_of_a_sampling_that_turbojpeg_does_not_know_are_decoded_in_its_place():
    """TurboJPEG is what shows libjpeg's warnings. The file has colours of 3 x 1 pixels."""
    content = b85decode(
        "|JeWA07C!>2nYxW2nYxW2nYxW2nYxW2nYxW2nYxW2nYxW2nYxW2nYxW2nYxW2nYxW2nYxW2nYxW2nYxW2nYxW2nYxW2nY"
        "!O!~h=v0000C000000000000000009C61O)~M2nh-c|HJ?k5CH%H0000000000000000095M01*fP5C9kh0Wkmq5dZ@b0R"
        "P$m3<CiG0ssR506zc#0HZCBAOHX#|Je"
    )
    verify(array(content))
    with pytest.raises(ValueError, match=DAMAGED):
        verify(array(content[:-6]))


@pytest.mark.parametrize("level", [0, 255])
def test_no_block_is_brighter_than_white_or_darker_than_black(level):
    """As a damaged difference makes all blocks that follow."""
    content = bytearray(encode(Image.new("RGB", (32, 32), (level,) * 3), "JPEG", quality=90))
    assert damage(array(content)) is None
    content[content.index(b"\xff\xdb") + 5] *= 2  # the step of the means of blocks
    assert "brighter than white" in damage(array(content))


@pytest.mark.parametrize("restart", [0, 3])
@pytest.mark.parametrize("count", [1, 4, 40])
def test_bytes_that_the_pixels_do_not_need_are_found(restart, count):
    content = encode(photograph(), "JPEG", restart_marker_blocks=restart)
    decode(array(content))
    assert damage(array(content[:-2] + b"\xff\xff" + content[-2:])) is None  # fill bytes
    assert damage(array(content[:-2] + b"\x15" * count + content[-2:])) is not None


def test_all_backends_refuse_the_same_damaged_images():
    damaged = [
        mutation(ORIGINALS[kind], np.random.default_rng(seed))
        for kind, mutation in MUTATIONS.items()
        for seed in range(3)
    ]
    source = InMemory([encode(photograph(), "JPEG"), *damaged])
    options = {"batch_size": 13, "threads": 1, "verify": "strict", "on_error": "skip"}
    skipped = []
    for backend in BACKENDS:
        evaluation = Loader(source, SMALL, training=False, backend=backend, **options)
        count = sum(len(batch.labels) for batch in evaluation)
        assert count + len(evaluation.skipped) == len(source)
        skipped.append(evaluation.skipped)
    assert skipped[0] == skipped[1] == skipped[2]
    assert len(skipped[0]) > 40


def test_an_image_is_verified_when_it_is_first_read_and_when_its_bytes_change(
    photos, tmp_path, monkeypatch
):
    root, verified = shutil.copytree(photos, tmp_path / "data"), []
    monkeypatch.setattr(
        reader, "verify_image", lambda content: (verified.append(1), verify(content))
    )
    options = {"batch_size": 53, "backend": "torchvision", "prefetch": 1, "verify": "strict"}
    assert [len(batch.labels) for batch in loader(root, epochs=3, **options)] == [53] * 3
    assert len(verified) == 53

    batches = iter(loader(root, epochs=6, **options))
    next(batches)
    (tmp_path / "other.jpg").write_bytes(encode(photograph(), "JPEG")[:-900] + b"\xff\xd9")
    # Replaced as a whole: the loader reads on, and could meet an empty file.
    (tmp_path / "other.jpg").replace(root / "train" / "ant" / "003.JPEG")
    refused(r"ant/003.JPEG is damaged: Corrupt JPEG data", list, batches)


def test_a_missing_package_is_named(photos, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = r"verify=strict needs simplejpeg, .*: pip install 'largebatch\[recipes\]'"
    refused(message, loader, photos, verify="strict")
