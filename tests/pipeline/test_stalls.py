"""The stages of a loader, taken apart."""

import numpy as np
import pytest
from PIL import Image

from largebatch.pipeline import ImageFolder, Loader, Synthetic, Transform
from largebatch.pipeline.stalls import measure_stages


@pytest.mark.parametrize("backend", ["dali-cpu", "torchvision"])
def test_stages_are_measured_on_the_images_of_the_loader(tmp_path, backend):
    folder = tmp_path / "train" / "class"
    folder.mkdir(parents=True)
    coarse = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    for i in range(8):
        Image.fromarray(coarse).resize((640, 480)).save(folder / f"{i}.jpeg")
    transform = Transform(image_size=64, eval_resize=72)
    loader = Loader(ImageFolder(tmp_path), transform, batch_size=8, epochs=1, backend=backend)
    times = measure_stages(loader)
    assert loader.reader.images > 0
    assert times.read_seconds > 0
    assert times.decode_seconds > 0
    assert times.transform_seconds >= 0
    assert times.smaller_side == 96
    assert times.side == 480
    assert times.smaller_decode_seconds > 0
    assert times.encoded_bytes == np.mean([path.stat().st_size for path in folder.iterdir()])
    assert loader.epoch == 0  # training goes on as if nothing had been measured


def test_small_images_would_not_get_smaller_and_synthetic_ones_have_no_stages(photos):
    transform = Transform(image_size=64, eval_resize=72)
    assert measure_stages(Loader(ImageFolder(photos), transform, batch_size=8)).side < 96
    times = measure_stages(Loader(ImageFolder(photos), transform, batch_size=8))
    assert times.smaller_decode_seconds is None
    with pytest.raises(ValueError, match="synthetic images have no stages"):
        measure_stages(Loader(Synthetic(10, 2), transform, batch_size=8))
