"""The networks that are compared before a grid is made of one."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.recipes.small_network import NETWORKS, runs, table
from largebatch.recipes.models.build import build_model
from largebatch.recipes.schema.load import load


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_a_network_has_the_operations_that_the_table_says(network):
    recipe = load(network.recipe, [*network.overrides]).recipe
    model, size = build_model(recipe.model, 10), recipe.data.image_size
    with FlopCounterMode(display=False) as counter:
        model(torch.rand(2, 3, size, size)).sum().backward()
    assert counter.get_total_flops() / 2e6 == pytest.approx(network.mflop, rel=0.01)
    assert f" at {size} px" in network.name


def test_runs_are_scored_on_held_out_images_at_the_small_batch():
    for run in runs():
        recipe = load(run.recipe, [*run.overrides]).recipe
        assert recipe.batch_size == 256
        assert recipe.data.holdout == 5000
        assert (recipe.precision, recipe.epochs) == (
            run.identity["precision"],
            run.identity["epochs"],
        )
    lengths = [len(n.epochs) + len(n.epochs_fp32) for n in NETWORKS]
    assert len(runs()) == len({str(run.identity) for run in runs()}) == sum(lengths)


def test_the_table_has_the_most_accurate_first():
    rows = [
        {**run.identity, "top1": 80.0 + number, "train_seconds": 60.0 * run.identity["epochs"]}
        for number, run in enumerate(runs())
    ]
    lines = table(rows).splitlines()[2:]
    assert len(lines) == len(rows)
    assert f" {79 + len(rows)}.00 | 60.0 | 20.0 |" in lines[0]
