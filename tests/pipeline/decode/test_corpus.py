"""The same picture on every back end, for files in all the forms that people have."""

import numpy as np
import pytest
from torchvision.transforms.v2 import functional as F

from benchmarks.pipeline.damaged_images import InMemory
from largebatch.pipeline import Loader, Transform
from largebatch.pipeline.decode.header import image_size, needs_reference
from largebatch.pipeline.decode.verify import verify
from tests.pipeline import loaders
from tests.pipeline.decode.corpus import corpus
from tests.pipeline.loaders import BACKENDS, take

LEVELS = Transform(image_size=64, eval_resize=64, **loaders.LEVELS)
CORPUS = corpus()
EXTENDED = ("WebP, lossy, alpha", "WebP with", "WebP, animated")


def images(backend, **options):
    source = InMemory([content for content, _ in CORPUS.values()])
    source.labels, source.classes = np.arange(len(source)), tuple(CORPUS)
    options = {"batch_size": len(source), "backend": backend, "threads": 1} | options
    images, labels = take(Loader(source, LEVELS, **options))
    return images[labels.argsort()]


def assert_near(found, expected, mean, largest):
    for name, one, other in zip(CORPUS, found, expected, strict=True):
        difference = (one - other).abs()
        assert difference.mean() <= mean, name
        assert difference.max() <= largest, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_back_end_delivers_the_picture_that_was_encoded(backend):
    """Within what JPEG and WebP lose; and within 4 levels of the reference's pixels."""
    expected = []
    for _, picture in CORPUS.values():
        short = min(picture.size)
        resized = F.resize(picture, [64 * picture.height // short, 64 * picture.width // short])
        expected.append(F.pil_to_tensor(F.center_crop(resized, 64)).float())
    found = images(backend, training=False, batch_size=40)
    assert_near(found, expected, 2.0, 12.0)
    assert_near(found, images("torchvision", training=False), 0.6, 4.0)


@pytest.mark.parametrize("backend", ["nvimgcodec", "dali-cpu"])
def test_every_back_end_delivers_the_same_crops_and_flips(backend):
    """At the edges of a crop, a decoder of regions interpolates subsampled colours less.

    DALI 2.4 crashes if a batch holds an image that it cannot parse: none reaches it.
    """
    found, expected = (images(b, epochs=1) for b in (backend, "torchvision"))
    assert_near(found, expected, 2.0, 64.0)


@pytest.mark.parametrize("name", CORPUS)
def test_no_valid_file_is_called_damaged_and_its_header_has_its_size(name):
    content = np.frombuffer(CORPUS[name][0], np.uint8)
    verify(content)
    assert image_size(content) == CORPUS[name][1].size


def test_the_reference_decodes_what_is_neither_grey_nor_ycbcr_nor_in_a_simple_format():
    found = {name for name, (c, _) in CORPUS.items() if needs_reference(np.frombuffer(c, np.uint8))}
    assert found == {
        name for name in CORPUS if name.startswith(("CMYK", "YCCK", "RGB", "GIF", *EXTENDED))
    }


BROKEN = ["PNG, RGB, 8 bits", "BMP, RGB", "WebP, lossy", "WebP, alpha", "GIF"]
BROKEN += ["4:2:0, progressive True"]


@pytest.mark.parametrize(("name", "share"), [*zip(BROKEN, [0.1, 0.5, 0.9] * 2, strict=True)])
def test_a_truncated_file_of_any_format_is_named_among_others(name, share):
    whole = [content for content, _ in CORPUS.values()]
    broken = CORPUS[name][0]
    source = InMemory([*whole, broken[: int(len(broken) * share)]])
    options = {"batch_size": len(source), "epochs": 1, "threads": 1, "on_error": "skip"}
    for backend in BACKENDS:
        training = Loader(source, LEVELS, backend=backend, **options)
        (batch,) = training
        assert len(batch.labels) == len(source)
        assert [*training.skipped] in ([f"image {len(whole)}"], [])
        assert training.skipped or name == "GIF"
