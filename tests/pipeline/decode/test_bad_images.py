"""Unusual and unusable images: which are decoded, which raise, which are skipped."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.pipeline.damaged_images import InMemory
from benchmarks.pipeline.odd_images import GOOD, UNUSABLE, encode, picture, write_folder
from largebatch.pipeline import Loader
from largebatch.pipeline.decode.header import image_size
from largebatch.pipeline.decode.pillow import as_png, check_header, decode
from largebatch.pipeline.decode.verify import verify
from largebatch.pipeline.prepare.shrink import shrink
from tests.conftest import refused
from tests.pipeline import loaders
from tests.pipeline.loaders import BACKENDS, SMALL, take


def loader(root, **options):
    return loaders.loader(root, **{"batch_size": GOOD + 1, "epochs": 1} | options)


HALF = encode(picture(), "JPEG", quality=92)[:1200] + b"\xff\xd9"  # which decoders pass over


NAMES = ["half of it gone", *UNUSABLE]


@pytest.mark.parametrize(
    ("name", "backend"),
    [*zip(NAMES, itertools.cycle(BACKENDS), strict=False), *((NAMES[0], b) for b in BACKENDS[1:])],
)
def test_an_unusable_image_stops_training_or_is_substituted(tmp_path, backend, name):
    write_folder(tmp_path, UNUSABLE.get(name, lambda: HALF)())
    options, what = {"backend": backend, "verify": "decode"}, "cannot be (read|decoded): "
    if name not in UNUSABLE:
        training = loader(tmp_path, **options)
        assert sum(len(batch.labels) for batch in training) == GOOD + 1
        assert training.skipped == {}
        options["verify"], what = "strict", "is damaged: Corrupt JPEG data: premature end of data"
    for split in ("train", "val"):
        message = f"{split}/class/05odd.JPEG {what}.*on_error=skip"
        refused(message, list, loader(tmp_path, training=split == "train", **options))

    options["on_error"] = "skip"
    training = loader(tmp_path, **options)
    images, labels = take(training)
    assert len(labels) == GOOD + 1
    assert images.flatten(1).std(1).min() > 0.05  # none of them is blank
    ((path, reason),) = training.skipped.items()
    assert path.endswith("train/class/05odd.JPEG")
    assert re.match(what, reason)
    assert training.replaced == 1

    evaluation = loader(tmp_path, training=False, micro_batch_size=5, **options)
    for _ in range(2):
        assert sum(len(batch.labels) for batch in evaluation) == GOOD
    assert len(evaluation.skipped) == 1
    assert evaluation.replaced == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_substitute_depends_on_the_data_alone(tmp_path, backend):
    """Not on when the bad image is found, by which rank, or on the number of ranks."""
    write_folder(tmp_path, b"")
    (tmp_path / "train" / "class" / "06.JPEG").write_bytes(b"bad too")
    options = {"batch_size": 12, "epochs": 3, "backend": backend, "on_error": "skip"}
    whole = take(loader(tmp_path, **options))
    ranks = [
        loader(tmp_path, **options, micro_batch_size=3, rank=rank, world_size=2)
        for rank in range(2)
    ]
    blocks = list(itertools.chain.from_iterable(zip(*ranks, strict=True)))
    assert torch.equal(torch.cat([b.images for b in blocks]), whole[0])
    first = loader(tmp_path, **options)
    next(iter(first))
    second = loader(tmp_path, **options)
    second.load_state_dict(first.state_dict())
    assert torch.equal(take(second)[0], whole[0][12:])


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99 99\n%%EndComments\nshowpage\n%%EOF\n"


def test_an_eps_file_is_in_none_of_the_formats():
    """Pillow would start Ghostscript for it."""
    content = np.frombuffer(EPS, np.uint8)
    for use in (decode, check_header, as_png, image_size, verify, lambda _: shrink(EPS, 8, 90)):
        with pytest.raises(ValueError, match="it is in none of the formats JPEG, PNG, "):
            use(content)


def test_a_data_set_without_usable_images_is_refused(tmp_path):
    write_folder(tmp_path, b"")
    for path in (tmp_path / "train" / "class").iterdir():
        path.write_bytes(b"nothing")
    message = r"none of the 13 images can be used: .*cannot be decoded"
    refused(message, list, loader(tmp_path, backend="torchvision", on_error="skip"))


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_000)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_image_that_would_fill_the_memory_in_evaluation_is_refused(tmp_path, backend, size):
    """With a shorter side of 1 pixel, it would be resized to 28 x 1,680,000 pixels and more."""
    source = InMemory([encode(Image.new("L", s), "JPEG") for s in (size, (40, 40))])
    whole = replace(SMALL, eval_resize=2000)
    options = {"batch_size": 2, "threads": 1, "backend": backend, "training": False}
    message = r"image 0 has \d+ x \d+ pixels, which evaluation would"
    refused(message, list, Loader(source, whole, **options))
    (batch,) = Loader(source, whole, on_error="skip", **options)
    assert len(batch.labels) == 1
    (batch,) = Loader(source, whole, **options | {"training": True, "epochs": 1})
    assert len(batch.labels) == 2  # a crop is of the model's size
