"""The model of CUDA graphs repeats operators, and nothing that Python does."""

import math

import pytest
import torch
from torch import nn

from tests.recipes.training.recorded_graph import RecordedGraphs

CPU = torch.device("cpu")


def test_the_model_of_graphs_repeats_operators_and_no_python():
    weight, rate = torch.ones(3, requires_grad=True), torch.tensor(0.5)
    number = 2.0

    def work():
        loss = (weight * number).sum()
        loss.backward()
        with torch.no_grad():
            weight.sub_(weight.grad * rate)
        return loss.detach(), torch.rand(2)

    torch.manual_seed(1)
    state = torch.get_rng_state()
    (loss, random), replay = RecordedGraphs(CPU).capture(work)
    assert torch.equal(weight, torch.ones(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert math.isnan(loss)
    number = 100.0
    replay()
    assert loss == 6.0
    assert torch.equal(weight, torch.zeros(3))
    rate.fill_(-1)
    torch.manual_seed(2)
    replay()
    assert torch.equal(weight, torch.full((3,), 2.0))
    assert torch.equal(random, torch.rand(2, generator=torch.Generator().manual_seed(2)))
    with pytest.raises(AssertionError, match="_local_scalar_dense"):
        RecordedGraphs(CPU).capture(lambda: float(rate))


def test_the_model_of_graphs_undoes_statistics_of_batch_norm():
    layer = nn.BatchNorm1d(2)
    _, replay = RecordedGraphs(CPU).capture(lambda: layer(torch.rand(4, 2)))
    assert torch.equal(layer.running_mean, torch.zeros(2))
    replay()
    replay()
    assert layer.num_batches_tracked == 2
    assert layer.running_mean.min() > 0
