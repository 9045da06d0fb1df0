"""The presets of GPUs and links."""

import pytest

from largebatch.comm import Cluster, Level, Links, StepTime
from largebatch.recipes.predict.presets import GPUS, INTER, INTRA, STRAGGLER_SIGMA
from largebatch.recipes.predict.scaling import setting, sweep
from largebatch.recipes.schema.load import load


def test_every_preset_states_its_source():
    tags = ("[S]", "[C]", "[M]", "assumed", "unknown")
    for entry in (*GPUS.values(), *INTRA.values(), *INTER.values()):
        assert entry.source.startswith(tags), entry
    for gpu in GPUS.values():
        assert gpu.fixed_source.startswith(tags)
        assert gpu.between_source.startswith(tags)
        assert gpu.between[0] <= gpu.images_per_second <= gpu.between[1]
        intra, inter = gpu.links
        Cluster.of(16, gpu.per_node, Links(INTRA[intra].level, INTER[inter].level))
    assert INTER["roce100"].level == Level.of(9.6, 100)
    for link in (*INTRA.values(), *INTER.values()):
        assert 0.75 * link.gbit / 8 <= link.bus_gbytes <= link.gbit / 8


@pytest.mark.parametrize(
    ("gpu", "published"),
    [("v100", 8322), ("a100", 16621), ("h100", 56660), ("p100", 8 * 138), ("p40", 218)],
)
def test_a_node_of_a_preset_is_as_fast_as_the_source_says(gpu, published):
    preset = GPUS[gpu]
    common = setting(load("resnet50-b65536"), gpu=gpu, images_per_gpu=preset.images)
    if preset.gpus == 1:
        found = common.images_per_second
    else:
        point = sweep(common, preset.gpus)[-1]
        found = preset.gpus * preset.images / point.default.step_seconds
    assert found == pytest.approx(published, rel=0.02)


def test_the_times_per_step_are_those_of_their_sources():
    p100 = StepTime.through((32, 32 / 195), (64, 64 / 219))
    assert GPUS["p100"].fixed_seconds == pytest.approx(p100.fixed_seconds, rel=0.01)
    epoch = 1_281_167
    # One node of 4 H100, 400 and 816 images each, waits for the slowest of 4.
    steps = [
        (each, 4 * each * 60 * minutes / (epochs * epoch))
        for each, epochs, minutes in ((400, 35, 26.7), (816, 36, 26.6))
    ]
    h100 = StepTime.through(*steps).fixed_seconds / (1 + STRAGGLER_SIGMA * 1.665)
    assert GPUS["h100"].fixed_seconds == pytest.approx(h100, rel=0.03)
