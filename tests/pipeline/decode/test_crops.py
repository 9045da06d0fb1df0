"""Crops: they are those of torchvision."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torchvision.transforms import RandomResizedCrop, v2

from largebatch.pipeline import Transform
from largebatch.pipeline.decode.crops import evaluation_crop, training_crop
from largebatch.pipeline.order import UNIFORMS, uniforms

side = st.integers(1, 4000)
numbers = st.integers(0, 2**32).map(lambda seed: np.random.default_rng(seed).random((1, UNIFORMS)))


@given(side, side, numbers)
def test_training_regions_lie_in_the_image(width, height, uniform):
    crop = training_crop(np.array([[width, height]]), uniform, Transform())
    x, y, w, h = crop.region[0]
    assert 0 <= x < x + w <= width
    assert 0 <= y < y + h <= height


@pytest.mark.parametrize(
    ("size", "area"),
    [((500, 375), (0.08, 1.0)), ((300, 900), (0.05, 1.0)), ((64, 64), (0.6, 0.9))],
)
def test_training_regions_are_distributed_as_torchvisions(size, area):
    """Two-sample Kolmogorov-Smirnov tests of area, aspect and position."""
    count, transform = 4000, Transform(crop_area=area)
    ours = training_crop(np.tile(size, (count, 1)), uniforms(3, 1, 0, count), transform).region
    torch.manual_seed(0)
    drawn = partial(RandomResizedCrop.get_params, torch.empty(3, *size[::-1]), list(area))
    theirs = np.array([drawn([3 / 4, 4 / 3]) for _ in range(count)])
    theirs = theirs[:, [1, 0, 3, 2]]  # of top, left, height, width
    for name in ("area", "aspect", "x", "y"):
        one, other = (
            {"area": w * h, "aspect": w / h, "x": x, "y": y}[name]
            for x, y, w, h in (ours.T, theirs.T)
        )
        assert stats.ks_2samp(one, other).pvalue > 1e-4, name


def test_the_largest_central_region_is_used_if_no_try_fits():
    transform = Transform(crop_area=(1.0, 1.0), crop_aspect=(1.0, 1.0))
    crop = training_crop(np.array([[100, 40], [40, 100]]), uniforms(0, 0, 0, 2), transform)
    assert crop.region.tolist() == [[30, 0, 40, 40], [0, 30, 40, 40]]


def test_flips_have_the_given_probability():
    for flip in (0.0, 0.25, 1.0):
        numbers, transform = uniforms(0, 0, 0, 20_000), Transform(flip=flip)
        crop = training_crop(np.full((20_000, 2), 50), numbers, transform)
        assert crop.mirrored.mean() == pytest.approx(flip, abs=0.01 if 0 < flip < 1 else 0)


@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([(224, 256), (32, 32), (7, 9)]))
def test_evaluation_is_resize_and_centre_crop(width, height, sizes):
    image_size, eval_resize = sizes
    transform = Transform(image_size=image_size, eval_resize=eval_resize)
    crop = evaluation_crop(np.array([[width, height]]), transform)
    assert crop.region[0].tolist() == [0, 0, width, height]
    # torchvision's arithmetic, without allocating images of that size
    resized = v2.functional._geometry._compute_resized_output_size
    expected = resized((height, width), size=[eval_resize])
    assert crop.resized[0].tolist() == expected[::-1]
    top = round((expected[0] - image_size) / 2)
    left = round((expected[1] - image_size) / 2)
    assert crop.corner[0].tolist() == [left, top]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"translate": -1}, "translate: -1 is not valid; valid: at least 0"),
        ({"translate": 224}, "translate: 224 is not valid; valid: at least 0, below"),
        ({"image_size": 0}, "image_size: 0 is not valid; valid: at least 1"),
        ({"flip": 1.5}, "flip: 1.5 is not valid; valid: 0 to 1, or alternating"),
        ({"erasing": 1.5}, "erasing: 1.5 is not valid; valid: 0 to 1"),
        ({"interpolation": "area"}, "interpolation: 'area' is not valid; valid: bilinear, bicubic"),
        ({"image_size": 224, "eval_resize": 200}, "eval_resize: 200 is not valid; valid: at least"),
    ],
)
def test_impossible_transforms_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Transform(**options)
