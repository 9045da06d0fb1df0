"""resnet50-jia-b65536 runs the paper's whole system: precision, all-reduce, decay and gamma."""

import os
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.comm import Plan, Rule, Topology, execute
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
from largebatch.recipes.training import build
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


def reductions(trainer):
    """How often the hook ran each algorithm, by name, ranks in its groups, and dtype sent."""
    called = Counter()
    original = execute._phases_in_dtype

    def noted(algorithm, tensor, dtype, topology):
        groups = topology.groups.intra, topology.groups.inter
        ranks = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups if group)
        called[algorithm.name, ranks, dtype] += 1
        return original(algorithm, tensor, dtype, topology)

    with mock.patch.object(execute, "_phases_in_dtype", noted):
        trainer.run()
    return called


def run_on_layouts(folder):
    """What reduces the flagship's gradients, by the layout of four ranks."""
    rank = dist.get_rank()
    job = Job(rank, 4, 4, CPU)
    found = {}
    for layout, node, keys in (
        ("2 x 2", 0, ["comm.ranks_per_node=2"]),
        ("3 + 1", rank // 3, []),
        ("one node", 0, []),
    ):
        os.environ["GROUP_RANK"] = str(node)
        overrides = [*SMALL, *keys, f"run_dir={folder}/{layout}"]
        trainer = Trainer.of(load(NAME, overrides), job, quiet=True)
        found[layout] = reductions(trainer)
        for name, value in trainer.model.named_parameters():
            first = value.detach().clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, value), name
    return found


@pytest.mark.slow("trains on four ranks, in three layouts")
def test_the_nodes_choose_the_all_reduce_that_runs(tmp_path):
    # Batch norms are in FP32 and have buckets of their own.
    half, single = torch.float16, torch.float32
    for rank, found in enumerate(run_ranks(4, run_on_layouts, tmp_path)):
        ranks = [(0, 1), (2, 3)][rank // 2], (rank % 2, rank % 2 + 2)
        assert found["2 x 2"].keys() == {("hierarchical", ranks, d) for d in (half, single)}
        ranks = [((0, 1, 2), (0, 3)), ((0, 1, 2),), ((0, 1, 2),), ((0, 3),)][rank]
        assert found["3 + 1"].keys() == {("leader", ranks, d) for d in (half, single)}
        assert not found["one node"]  # the back end's own all-reduce


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
def test_auto_depends_on_the_nodes(nodes, algorithm):
    recipe = load(NAME).recipe
    assert recipe.comm.algorithm == "auto"
    assert build.build_plan(recipe, Topology(nodes)) == Plan.single(algorithm)
    assert build.build_plan(load("resnet50-b65536").recipe, Topology(nodes)) == Plan.single("ring")


def test_precision_decay_and_gamma_are_the_papers(tmp_path):
    trainer = Trainer.of(load(NAME, [*SMALL, f"run_dir={tmp_path}"]), Job(0, 1, 1, CPU), quiet=True)
    assert trainer.precision.name == "fp16-master"
    norms = {n: m for n, m in trainer.model.named_modules() if isinstance(m, _BatchNorm)}
    blocks = {name.rpartition(".")[0] for name in norms if name.startswith("layer")}
    blocks = {name for name in blocks if not name.endswith("downsample")}
    last = {max(n for n in norms if n.startswith(block + ".bn")) for block in blocks}
    assert {name for name, norm in norms.items() if not norm.weight.any()} == last
    assert len(last) >= 2
    of_norms = {id(p) for m in norms.values() for p in m.parameters()}
    parameters = dict(trainer.model.named_parameters())
    exempt = of_norms | {id(p) for name, p in parameters.items() if name.endswith("bias")}
    decays = {}
    for group in trainer.optimizer.param_groups:
        decays |= {id(p): (group["weight_decay"], group["adapt"]) for p in group["params"]}
    assert trainer.run()["step"] == 1
    for name, p in parameters.items():
        assert decays[id(p)] == ((0.0, False) if id(p) in exempt else (1e-4, True)), name
        assert p.dtype == (torch.float32 if id(p) in of_norms else torch.float16), name
    masters = [s["master"] for s in trainer.optimizer.state.values() if "master" in s]
    assert masters
    assert all(master.dtype == torch.float32 for master in masters)


def test_a_given_plan_comes_before_the_nodes(tmp_path):
    plan = Plan((Rule("leader", 2**20), Rule("hierarchical", chunk_bytes=2**20)))
    plan.save(tmp_path / "plan.json")
    recipe = load(NAME, [f"comm.plan={tmp_path}/plan.json"]).recipe
    assert build.build_plan(recipe, Topology.of(4, 4)) == plan
