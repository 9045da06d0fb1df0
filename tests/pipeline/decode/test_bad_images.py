"""Unusual and unusable images: which are decoded, which raise, which are skipped."""

import io
import itertools
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from benchmarks.pipeline.odd_images import GOOD, UNUSABLE, USABLE, encode, picture, write_folder
from largebatch.pipeline import DataError, ImageFolder, Loader, Transform
from largebatch.pipeline.decode.header import image_size, is_complete_jpeg
from largebatch.pipeline.decode.pillow import decode

SMALL = Transform(image_size=24, eval_resize=28)
BACKENDS = ["nvimgcodec", "dali-cpu", "torchvision"]
ODD = 6  # position of the unusual image among the others


def array(content):
    return np.frombuffer(content, dtype=np.uint8)


def loader(root, split="train", **options):
    options = {"batch_size": GOOD + 1, "epochs": 1, "threads": 1} | options
    return Loader(ImageFolder(root, split), SMALL, training=split == "train", **options)


def images_and_labels(source):
    batches = list(source)
    return torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])


@pytest.mark.parametrize("name", USABLE)
def test_unusual_images_decode_to_the_expected_pixels_with_all_backends(tmp_path, name):
    content = USABLE[name]()
    write_folder(tmp_path, content)
    picture = Image.open(tmp_path / "train" / "class" / "05odd.JPEG")
    width, height = picture.size
    if picture.mode.startswith("I"):  # which Pillow clips
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    short = min(width, height)
    resized = F.resize(picture.convert("RGB"), [28 * height // short, 28 * width // short])
    tensor = F.to_dtype(F.to_image(F.center_crop(resized, 24)), torch.float32, scale=True)
    expected = F.normalize(tensor, list(SMALL.mean), list(SMALL.std))
    assert (expected.flatten(1).std(1).max() > 0.05) == (name != "1 × 1 pixel")
    for backend in BACKENDS:
        images, _ = images_and_labels(loader(tmp_path, "val", backend=backend))
        assert len(images) == GOOD + 1
        levels = 255 * 0.226 * (images[ODD] - expected).abs()
        assert levels.max() < 2.5, backend


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_image_stops_training_or_is_substituted(tmp_path, backend, name):
    write_folder(tmp_path, UNUSABLE[name]())
    with pytest.raises(DataError, match=r"class/05odd.JPEG cannot be (read|decoded): .*on_error"):
        list(loader(tmp_path, backend=backend))
    with pytest.raises(DataError, match=r"val/class/05odd.JPEG cannot be"):
        list(loader(tmp_path, "val", backend=backend))

    training = loader(tmp_path, backend=backend, on_error="skip")
    images, labels = images_and_labels(training)
    assert len(labels) == GOOD + 1
    assert images.flatten(1).std(1).min() > 0.05  # none of them is blank
    (path,) = training.skipped
    assert path.endswith("train/class/05odd.JPEG")
    assert training.skipped[path].startswith("cannot be ")
    assert training.replaced == 1

    evaluation = loader(tmp_path, "val", backend=backend, on_error="skip", micro_batch_size=5)
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
    whole = images_and_labels(loader(tmp_path, **options))
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
    assert torch.equal(images_and_labels(second)[0], whole[0][12:])


def test_a_data_set_without_usable_images_is_refused(tmp_path):
    write_folder(tmp_path, b"")
    for path in (tmp_path / "train" / "class").iterdir():
        path.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"none of the 13 images can be used: .*cannot be decoded"):
        list(loader(tmp_path, backend="torchvision", on_error="skip"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_deleted_during_training_is_named_or_skipped(photos, tmp_path, backend):
    for on_error in ("stop", "skip"):
        root = tmp_path / on_error
        shutil.copytree(photos, root)
        source = loader(root, backend=backend, batch_size=53, epochs=9, on_error=on_error)
        batches = iter(source)
        next(batches)
        (root / "train" / "ant" / "003.JPEG").unlink()
        if on_error == "stop":
            with pytest.raises(DataError, match=r"ant/003.JPEG cannot be read: No such file"):
                list(batches)
        else:
            assert [len(batch.labels) for batch in batches] == [53] * 8
            assert len(source.skipped) == 1


@pytest.mark.parametrize("backend", ["nvimgcodec", "dali-cpu"])
def test_images_that_a_backend_cannot_decode_are_decoded_by_pillow(tmp_path, backend):
    """A GIF is in the second of three batches: the first is not repeated, the others are right."""
    write_folder(tmp_path, encode(picture(), "GIF"))
    found, torchvision = (
        images_and_labels(loader(tmp_path, backend=b, batch_size=5, epochs=3))
        for b in (backend, "torchvision")
    )
    assert len(found[0]) == 40
    assert (255 * 0.226 * (found[0] - torchvision[0]).abs()).flatten(1).mean(1).max() < 2


@pytest.mark.parametrize("name", USABLE)
def test_sizes_from_the_header_are_those_of_pillow(name):
    content = USABLE[name]()
    with Image.open(io.BytesIO(content)) as image:
        assert image_size(array(content)) == image.size


def test_a_complete_jpeg_differs_from_a_truncated_one():
    content = encode(picture(), "JPEG")
    assert is_complete_jpeg(array(content))
    assert is_complete_jpeg(array(content + b"\0" * 20))
    for end in (-1, -2, len(content) // 2, 2, 0):
        assert not is_complete_jpeg(array(content[:end]))
    assert not is_complete_jpeg(array(encode(picture(), "PNG")))


def test_16_bit_images_keep_their_levels():
    """Pillow's own conversion would clip them to white."""
    levels = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    found = np.asarray(decode(array(encode(Image.fromarray(levels), "PNG"))))[..., 0]
    assert np.abs(found.astype(int).ravel() - np.arange(256)).max() <= 1


def test_an_unknown_on_error_is_refused(photos):
    with pytest.raises(DataError, match="unknown on_error 'ignore'; valid: stop, skip"):
        loader(photos, on_error="ignore")


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_000)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_image_that_would_fill_the_memory_in_evaluation_is_refused(tmp_path, backend, size):
    """With a shorter side of 1 pixel, it would be resized to 28 x 1,680,000 pixels and more."""
    content = io.BytesIO()
    Image.new("L", size).save(content, "JPEG")
    for split in ("train", "val"):
        folder = tmp_path / split / "class"
        folder.mkdir(parents=True)
        (folder / "long.jpg").write_bytes(content.getvalue())
        Image.new("RGB", (40, 40)).save(folder / "plain.jpg")
    whole = replace(SMALL, eval_resize=2000)
    source = ImageFolder(tmp_path, "val")
    options = {"batch_size": 2, "threads": 1, "backend": backend, "training": False}
    with pytest.raises(DataError, match=r"long.jpg has \d+ x \d+ pixels, which evaluation would"):
        list(Loader(source, whole, **options))
    (batch,) = Loader(source, whole, on_error="skip", **options)
    assert len(batch.labels) == 1
    trained = Loader(
        ImageFolder(tmp_path, "train"), whole, **options | {"training": True, "epochs": 1}
    )
    (batch,) = trained
    assert len(batch.labels) == 2  # a crop is of the model's size
