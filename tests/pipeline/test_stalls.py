"""Measuring the input of a loader."""

import numpy as np
import pytest
from PIL import Image

from largebatch.pipeline import ImageFolder, Loader, Synthetic, Transform
from largebatch.pipeline.stalls import measure_input_times
from tests.pipeline.loaders import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS)
def test_input_times_are_measured_on_the_images_of_the_loader(tmp_path, backend):
    folder = tmp_path / "train" / "class"
    folder.mkdir(parents=True)
    coarse = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    for i in range(8):
        Image.fromarray(coarse).resize((640, 480)).save(folder / f"{i}.jpeg")
    transform = Transform(image_size=64, eval_resize=72)
    loader = Loader(ImageFolder(tmp_path), transform, batch_size=8, epochs=1, backend=backend)
    times = measure_input_times(loader)
    assert loader.reader.images_read > 0
    assert times.read_seconds > 0
    assert times.decode_seconds > 0
    assert times.transform_seconds >= 0
    assert times.smaller_side == 96
    assert times.side == 480
    assert times.smaller_decode_seconds > 0
    assert times.encoded_bytes == np.mean([path.stat().st_size for path in folder.iterdir()])
    assert loader.epoch == 0  # the position of training is unchanged


def test_small_images_have_no_smaller_size_and_synthetic_ones_no_input_times(photos):
    transform = Transform(image_size=64, eval_resize=72)
    times = measure_input_times(Loader(ImageFolder(photos), transform, batch_size=8))
    assert times.side < 96
    assert times.smaller_decode_seconds is None
    with pytest.raises(ValueError, match="synthetic images are not decoded"):
        measure_input_times(Loader(Synthetic(10, 2), transform, batch_size=8))
