"""resnet50-jia-b65536 runs the paper's whole system: precision, all-reduce, decay and gamma."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.comm import Plan, Rule, Topology
from largebatch.recipes.models.build import residual_blocks
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
from largebatch.recipes.training import build, run
from largebatch.recipes.training.trainer import Trainer
from tests.ranks import run_ranks

NAME = "resnet50-jia-b65536"
SMALL = [
    *("model.name=test_resnet", "data.source=synthetic", "data.train_images=64", "device=cpu"),
    *("data.val_images=4", "data.classes=4", "data.image_size=16", "data.eval_resize=16"),
    *("batch_size=8", "micro_batch_size=2", "epochs=1", "schedule.warmup=1", "stop_after=1"),
    *("schedule.decay=null", "evaluate_every=null"),
    "loss_scale=128",  # which skips no step to find its scale
]
CPU = torch.device("cpu")


def reduced_on_layouts(folder):
    """By which plan and over which nodes four ranks reduce the flagship's gradients, by layout."""
    rank = dist.get_rank()
    job = Job(rank, 4, 4, CPU)
    found = {}
    for layout, node, keys in (("2 x 2", 0, ["comm.ranks_per_node=2"]), ("3 + 1", rank // 3, [])):
        os.environ["GROUP_RANK"] = str(node)
        with mock.patch.object(run, "data_parallel", wraps=run.data_parallel) as reduces:
            Trainer.of(load(NAME, [*SMALL, *keys, f"run_dir={folder}/{layout}"]), job, quiet=True)
        _, _, plan, topology = reduces.call_args.args
        found[layout] = plan.rules[0].algorithm, topology.nodes
    return found


@pytest.mark.slow("starts four ranks")
def test_the_nodes_choose_the_all_reduce(tmp_path):
    found = {"2 x 2": ("hierarchical", ((0, 1), (2, 3))), "3 + 1": ("leader", ((0, 1, 2), (3,)))}
    assert run_ranks(4, reduced_on_layouts, tmp_path) == [found] * 4


@pytest.mark.parametrize(
    ("nodes", "algorithm"),
    [
        (((0, 1), (2, 3)), "hierarchical"),
        (((0, 1, 2), (3,)), "leader"),
        (((0, 1, 2, 3),), "ring"),
        (((0,), (1,)), "ring"),
        (((0,),), "ring"),
    ],
)
def test_auto_depends_on_the_nodes_and_a_given_plan_does_not(tmp_path, nodes, algorithm):
    def plan_of(name, *keys):
        return build.build_plan(load(name, keys).recipe, Topology(nodes))

    assert plan_of(NAME) == Plan.single(algorithm)
    assert plan_of("resnet50-b65536") == Plan.single("ring")
    given = Plan((Rule("leader", 2**20), Rule("hierarchical", chunk_bytes=2**20)))
    given.save(tmp_path / "plan.json")
    assert plan_of(NAME, f"comm.plan={tmp_path}/plan.json") == given


def test_precision_decay_and_gamma_are_the_papers(tmp_path):
    trainer = Trainer.of(load(NAME, [*SMALL, f"run_dir={tmp_path}"]), Job(0, 1, 1, CPU), quiet=True)
    assert trainer.precision.name == "fp16-master"
    norms = {m for m in trainer.model.modules() if isinstance(m, _BatchNorm)}
    last = set(residual_blocks(trainer.model).values())
    assert {norm for norm in norms if not norm.weight.any()} == last
    assert len(last) >= 2
    of_norms = {p for norm in norms for p in norm.parameters()}
    for group in trainer.optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            exempt = p in of_norms or name.endswith("bias")
            decay = (0.0, False) if exempt else (1e-4, True)
            assert (group["weight_decay"], group["adapt"]) == decay, name
