"""The presets of GPUs and links, and the speeds that users measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.comm import Plan
from largebatch.recipes.predict.presets import GPUS, INTER, INTRA, STRAGGLER_SIGMA
from largebatch.recipes.predict.scaling import setting
from largebatch.recipes.predict.speed import find_speed
from largebatch.recipes.schema.load import load

RECIPE = load("resnet50-b65536")


def test_presets_agree_with_one_another():
    for gpu in GPUS.values():
        assert gpu.between.low <= gpu.rate.images_per_second <= gpu.between.high
        intra, inter = gpu.links
        assert intra in INTRA
        assert inter in INTER
    for link in (*INTRA.values(), *INTER.values()):
        assert 0.75 * link.gbit / 8 <= link.bus_gbytes <= link.gbit / 8


@pytest.mark.parametrize(
    ("gpu", "published"),
    [("v100", 8322), ("a100", 16621), ("h100", 27258), ("p100", 8 * 138), ("p40", 218)],
)
def test_a_node_of_a_preset_is_as_fast_as_the_source_says(gpu, published):
    rate = GPUS[gpu].rate
    common = setting(RECIPE, gpu=gpu, images_per_gpu=rate.images)
    step = common.simulate(common.profile, rate.gpus, Plan.single("ring")).step_seconds
    assert rate.gpus * rate.images / step == pytest.approx(published, rel=0.02)


def test_a_preset_is_scaled_by_pixels_to_other_sizes_of_images_and_says_so():
    small = load("resnet50-b65536", ["data.image_size=112"]).recipe
    half, whole = (find_speed(recipe, "a100", None) for recipe in (small, RECIPE.recipe))
    assert half.step.seconds(400) == pytest.approx(whole.step.seconds(100))
    assert half.best.per_gpu == 4 * whole.best.per_gpu
    assert half.holds == tuple(4 * images for images in whole.holds)
    assert (half.between.low, half.between.high) == (4 * whole.between.low, 4 * whole.between.high)
    assert half.sources[:-1] == whole.sources
    assert half.sources[-1].endswith("scaled by pixels from 224 (assumed)")


@given(
    st.sampled_from([1, 4, 8]),
    st.tuples(st.integers(8, 500), st.integers(8, 500)).filter(lambda pair: pair[0] != pair[1]),
    st.floats(1e-4, 20e-3),
    st.floats(0.05e-3, 5e-3),
)
def test_a_speed_in_images_per_second_or_milliseconds_says_when_a_step_ends(
    gpus, images, fixed, slope
):
    """Of a node the slowest GPU is measured, for whom one GPU alone does not wait."""
    late = 1 + STRAGGLER_SIGMA * {1: 0, 4: 1.6651, 8: 2.0393}[gpus]
    steps = {n: late * (fixed + n * slope) for n in images}
    by_rate = ",".join(f"{gpus}x{n}:{gpus * n / s:.12f}" for n, s in steps.items())
    by_time = ",".join(f"{gpus}x{n}:{1e3 * s:.12f}ms" for n, s in steps.items())
    for text in (by_rate, by_time):
        found = find_speed(RECIPE.recipe, None, text)
        for n in images:
            assert found.step.seconds(n) == pytest.approx(steps[n] / late, rel=1e-4)
        assert (found.best.gpus, found.best.images) == (gpus, max(images))
        assert found.holds == (min(images), max(images))


def test_one_measured_speed_takes_the_fixed_time_of_the_preset_and_no_preset_has_none():
    with_preset = find_speed(RECIPE.recipe, "v100", "8x256:10000")
    alone = find_speed(RECIPE.recipe, None, "8x256:10000")
    other = find_speed(load("resnet50-b65536", ["model.name=resnet18"]).recipe, "v100", "256:1000")
    assert with_preset.step.fixed_seconds == GPUS["v100"].fixed.seconds
    assert alone.step.fixed_seconds == other.step.fixed_seconds == 0
    assert with_preset.step.seconds(256) == pytest.approx(alone.step.seconds(256))
    assert (alone.holds, with_preset.holds) == ((256, 256), (65, 256))
