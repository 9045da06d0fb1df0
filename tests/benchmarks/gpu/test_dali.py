"""The images of the part about decoding."""

import os

import pytest

from benchmarks.gpu import dali


def test_images_have_the_bytes_per_pixel_of_imagenet(tmp_path):
    dali.write_images(tmp_path, 8, dali.SIZE)
    sizes = [os.path.getsize(path) for path in tmp_path.rglob("*.JPEG")]
    assert len(sizes) == 8
    width, height = dali.SIZE
    assert sum(sizes) / (8 * width * height) == pytest.approx(dali.BYTES_PER_PIXEL, rel=0.05)
