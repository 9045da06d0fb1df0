"""Images in half precision and in channels_last: the same values in the requested layout."""

import pytest
import torch

from largebatch.pipeline import ImageFolder, Loader, Stage, Synthetic
from tests.pipeline.loaders import BACKENDS, SMALL


@pytest.fixture(params=[*BACKENDS, "synthetic"])
def make(photos, request):
    """Make a loader of 53 images with a back end."""
    synthetic = request.param == "synthetic"
    source = Synthetic(53, 3) if synthetic else ImageFolder(photos)
    own = {"threads": 1} | ({} if synthetic else {"backend": request.param})
    return lambda **options: Loader(source, SMALL, **own, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_memory_layout_does_not_change_values(make, dtype):
    whole = {"batch_size": 12, "epochs": 1}
    plain = [batch.images for batch in make(**whole)]
    other = make(**whole, dtype=dtype, memory_format=torch.channels_last)
    for a, b in zip(plain, (batch.images for batch in other), strict=True):
        assert b.dtype == dtype
        assert a.is_contiguous()
        assert b.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(a.to(dtype), b)


@pytest.mark.parametrize("last", [torch.contiguous_format, torch.channels_last])
def test_an_empty_batch_has_the_form_of_those_that_are_delivered(make, last):
    options = {"dtype": torch.float16, "memory_format": last}
    stages = [Stage(1, image_size=16, batch_size=6)]
    training = make(batch_size=12, epochs=2, stages=stages, **options)
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
    options |= {"batch_size": 24, "micro_batch_size": 8, "training": False}
    for world_size, most in ((1, 8), (3, 8), (20, 3)):  # shares of 53, 18 and 3 images
        empty = make(**options, world_size=world_size).empty_batch()
        last_rank = make(**options, world_size=world_size, rank=world_size - 1)
        full = max((batch.images for batch in last_rank), key=len)
        assert last_rank.full_batch == len(empty.labels) == len(full) == most
        assert full.stride() == empty.images.stride()
