"""The presets of GPUs and links."""

from largebatch.comm import Cluster, Level, Links
from largebatch.recipes.predict.presets import GPUS, INTER, INTRA


def test_every_preset_states_its_source():
    tags = ("[S]", "[C]", "[M]", "assumed")
    for entry in (*GPUS.values(), *INTRA.values(), *INTER.values()):
        assert entry.source.startswith(tags), entry
    for gpu in GPUS.values():
        intra, inter = gpu.links
        Cluster.of(16, gpu.per_node, Links(INTRA[intra].level, INTER[inter].level))
    assert INTER["roce100"].level == Level.of(9.6, 100)
