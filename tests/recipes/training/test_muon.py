"""Muon in runs on several ranks, which share the orthogonalisation."""

from unittest import mock

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.recipes.runs import (
    ROUNDING,
    assert_same,
    double_precision,
    largest_difference,
    make,
    weights,
)
from tests.recipes.training.small import SYNTHETIC, Small

pytestmark = pytest.mark.slow("trains small networks on two ranks")

KEYS = [
    *SYNTHETIC,
    *("optimizer.name=muon", "optimizer.lr=0.1", "optimizer.nesterov=true", "stop_after=5"),
    *("micro_batch_size=6", "evaluate_every=null", "track=[]", "optimizer.args.ns_dtype=float64"),
]


def network(recipe, classes):
    return Small(classes, hidden=8)


def train_on_ranks(folder):
    def made(name, *keys):
        with (
            mock.patch("largebatch.recipes.training.build.build_model", network),
            mock.patch("largebatch.recipes.training.build.check_image_size"),
            double_precision(),
        ):
            trainer = make(None, folder / name, *KEYS, *keys)
            trainer._start()
            trainer._train()
        return trainer

    shared = made("shared")
    assert dist.get_world_size(shared.optimizer.process_group) == 2
    made("part", "stop_after=2")
    assert_same(weights(made("part", "resume=true")), weights(shared))
    alone = made("alone", "optimizer.args.share=false")
    assert alone.optimizer.process_group is None
    return [{k: p.detach() for k, p in t.model.named_parameters()} for t in (shared, alone)]


def test_ranks_that_share_take_the_steps_of_those_that_do_not(tmp_path):
    (shared, alone), (other, _) = run_ranks(2, train_on_ranks, tmp_path)
    assert_same(shared, other)
    assert largest_difference(shared, alone) < ROUNDING
