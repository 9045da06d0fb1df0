"""The implementation of the optimizer on several ranks."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from largebatch.recipes.errors import AgreedError, RecipeError
from largebatch.recipes.models.optimizers import settle_on_device
from tests.ranks import run_ranks
from tests.recipes.runs import assert_same, make
from tests.recipes.training.small import SYNTHETIC, small_networks

pytestmark = pytest.mark.slow("trains small networks on two ranks")

SHORT = [*SYNTHETIC, "micro_batch_size=6", "evaluate_every=null", "track=[]", "stop_after=3"]
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
                keys = [*SHORT, f"optimizer.args.implementation={asked}"]
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
