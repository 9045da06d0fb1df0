"""The optimizer on several ranks: its implementation, and the work of Muon."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from largebatch.recipes.errors import AgreedError, RecipeError
from largebatch.recipes.models.optimizers import settle_on_device
from tests.ranks import run_ranks
from tests.recipes.runs import (
    ROUNDING,
    assert_same,
    double_precision,
    largest_difference,
    make,
    weights,
)
from tests.recipes.training.small import SYNTHETIC, small_networks

pytestmark = pytest.mark.slow("trains small networks on two ranks")

SHORT = [*SYNTHETIC, "micro_batch_size=6", "evaluate_every=null", "track=[]"]


NO_COMPILER = "RuntimeError: Failed to find C compiler"


def settle_as_on_gpus(optimizer, job):
    return settle_on_device(optimizer, replace(job, device=torch.device("cuda", job.rank)))


def settled_on_ranks(folder):
    def result(name, asked, found):
        launch_error = mock.Mock(side_effect=[found if dist.get_rank() == 1 else None])
        with (
            small_networks(),
            mock.patch("largebatch.recipes.training.run.settle_on_device", settle_as_on_gpus),
            mock.patch("largebatch.lars.implementations.triton_launch_error", launch_error),
        ):
            try:
                keys = [*SHORT, "stop_after=3", f"optimizer.args.implementation={asked}"]
                trainer = make(None, folder / name, *keys)
            except (RecipeError, torch.AcceleratorError) as error:
                return error
        trainer._start()
        trainer._train()
        notices = [line for line in trainer._built.notices if "Triton" in line]
        trained = {name: p.detach() for name, p in trainer.model.named_parameters()}
        return trainer.optimizer.implementation, notices, trained

    return {
        "falls back": result("a", "auto", NO_COMPILER),
        "foreach": result("b", "foreach", NO_COMPILER),
        "launches": result("c", "auto", None),
        "asked": result("d", "triton", NO_COMPILER),
        "device": result("e", "auto", torch.AcceleratorError("CUDA error: unknown error")),
    }


def test_all_ranks_take_the_implementation_that_each_of_them_has(tmp_path):
    ranks = run_ranks(2, settled_on_ranks, tmp_path)
    for found in ranks:
        name, notices, trained = found["falls back"]
        assert name == "foreach"
        problem = f"Triton launches no kernel on rank 1: {NO_COMPILER}"
        assert notices == [f"optimizer: foreach on all ranks, as {problem}"]
        assert_same(trained, ranks[0]["falls back"][2])
        assert_same(trained, found["foreach"][2])
        assert found["foreach"][:2] == ("foreach", [])
        assert found["launches"][:2] == ("auto", [])
        assert isinstance(found["asked"], RecipeError)
        assert str(found["asked"]) == (
            f"optimizer.args.implementation: triton, but {problem}; valid: auto or foreach"
        )
    assert isinstance(ranks[0]["device"], AgreedError)
    assert "rank 1: AcceleratorError: CUDA error" in str(ranks[0]["device"])
    assert isinstance(ranks[1]["device"], torch.AcceleratorError)


MUON = [*SHORT, "optimizer.name=muon", "optimizer.lr=0.1", "optimizer.nesterov=true"]
MUON += ["stop_after=5", "optimizer.args.ns_dtype=float64"]


def muon_on_ranks(folder):
    def made(name, *keys):
        with small_networks(hidden=8), double_precision():
            trainer = make(None, folder / name, *MUON, *keys)
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


def test_ranks_that_share_muons_work_take_the_steps_of_those_that_do_not(tmp_path):
    (shared, alone), (other, _) = run_ranks(2, muon_on_ranks, tmp_path)
    assert_same(shared, other)
    assert largest_difference(shared, alone) < ROUNDING
