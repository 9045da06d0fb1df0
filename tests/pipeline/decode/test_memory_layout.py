"""Images in half precision and in channels_last: the same values in the requested layout."""

import pytest
import torch

from largebatch.pipeline import DataError, ImageFolder, Loader, Synthetic, Transform

SMALL = Transform(image_size=24, eval_resize=28)


def images(source, **options):
    loader = Loader(source, SMALL, batch_size=12, epochs=1, threads=1, **options)
    return [batch.images for batch in loader]


@pytest.mark.parametrize("backend", ["dali-cpu", "torchvision", "synthetic"])
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


def test_another_dtype_is_refused(photos):
    with pytest.raises(
        DataError, match=r"unknown dtype torch.bfloat16 of images; valid: torch.float32"
    ):
        images(ImageFolder(photos), dtype=torch.bfloat16)
