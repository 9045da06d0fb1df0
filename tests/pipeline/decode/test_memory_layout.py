"""Images in half precision and in channels_last: the same values in the requested layout."""

import pytest
import torch

from largebatch.pipeline import ImageFolder, Loader, Stage, Synthetic, Transform
from tests.conftest import refused

SMALL = Transform(image_size=24, eval_resize=28)


def images(source, **options):
    loader = Loader(source, SMALL, batch_size=12, epochs=1, threads=1, **options)
    return [batch.images for batch in loader]


@pytest.mark.parametrize("backend", ["nvimgcodec", "dali-cpu", "torchvision", "synthetic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_memory_layout_does_not_change_values(photos, backend, dtype):
    source = Synthetic(53, 3) if backend == "synthetic" else ImageFolder(photos)
    options = {} if backend == "synthetic" else {"backend": backend}
    plain = images(source, **options)
    converted = images(source, **options, dtype=dtype, memory_format=torch.channels_last)
    for a, b in zip(plain, converted, strict=True):
        assert b.dtype == dtype
        assert a.is_contiguous()
        assert b.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(a.to(dtype), b)


@pytest.mark.parametrize("backend", ["nvimgcodec", "dali-cpu", "torchvision", "synthetic"])
@pytest.mark.parametrize("last", [torch.contiguous_format, torch.channels_last])
def test_an_empty_batch_has_the_form_of_those_that_are_delivered(photos, backend, last):
    source = Synthetic(53, 3) if backend == "synthetic" else ImageFolder(photos)
    options = {"dtype": torch.float16, "memory_format": last, "threads": 1}
    options |= {} if backend == "synthetic" else {"backend": backend}
    stages = [Stage(1, image_size=16, batch_size=6)]
    training = Loader(source, SMALL, batch_size=12, epochs=2, stages=stages, **options)
    sizes = set()
    batches = iter(training)
    for _ in range(8):
        empty = training.empty_batch()
        sizes.add(tuple(empty.images.shape))
        for ours, theirs in zip(empty, next(batches), strict=True):
            assert (ours.shape, ours.dtype, ours.device) == (
                *(theirs.shape, theirs.dtype, theirs.device),
            )
            assert ours.stride() == theirs.stride()
    assert sizes == {(12, 3, 24, 24), (6, 3, 16, 16)}
    batch = {"batch_size": 24, "micro_batch_size": 8, "training": False}
    for world_size, most in ((1, 8), (3, 8), (20, 3)):  # shares of 53, 18 and 3 images
        alone = Loader(source, SMALL, **batch, **options, world_size=world_size)
        assert alone.full_batch == len(alone.empty_batch().labels) == most
        ranks = [
            Loader(source, SMALL, **batch, **options, world_size=world_size, rank=rank)
            for rank in range(world_size if world_size < 4 else 0)
        ]
        if ranks:
            delivered = [batch.images for loader in ranks for batch in loader]
            assert max(len(images) for images in delivered) == most
            full = next(images for images in delivered if len(images) == most)
            assert full.stride() == alone.empty_batch().images.stride()


def test_another_dtype_is_refused(photos):
    message = r"unknown dtype torch.bfloat16 of images; valid: torch.float32"
    refused(message, images, ImageFolder(photos), dtype=torch.bfloat16)
