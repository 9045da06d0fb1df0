"""When a run is compiled: a decision of all its ranks, for the whole run."""

import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from largebatch.pipeline import Phase, Stage, lay_out
from largebatch.recipes.schema.load import load
from largebatch.recipes.training import device
from tests.ranks import run_ranks
from tests.recipes.runs import assert_same, make, weights
from tests.recipes.training.small import small, small_networks, small_trainer

__all__ = ["small"]  # a fixture


@given(
    ranks=st.sampled_from([1, 2, 4]),
    batches=st.lists(st.sampled_from([8, 16, 32]), min_size=1, max_size=3),
    images=st.integers(60, 200),
    epochs=st.integers(3, 5),
)
def test_passes_are_those_of_every_step_of_the_whole_run(ranks, batches, images, epochs):
    first, *later = batches
    stages = [Stage(n, batch_size=batch, micro_batch_size=2) for n, batch in enumerate(later, 1)]
    shape = Phase(0, 12, first, 2)
    run = lay_out(shape, stages, images=images, world_size=ranks, epochs=epochs)
    steps = [
        run.phases[run.phase_index(step)].accumulation(ranks) for step in range(run.total_steps)
    ]
    assert device.passes(run) == sum(steps)


@pytest.fixture
def compiles(small, monkeypatch):
    """Let ``auto`` compile on the CPU, whatever the length of a run, by a backend that counts."""
    graphs, compile = CompileCounterWithBackend("eager"), torch.compile
    torch.compiler.reset()
    monkeypatch.setattr(device, "DEVICES", ("cpu",))
    monkeypatch.setattr(device, "LEAST_PASSES", 0)
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile(f, backend=graphs, dynamic=False))
    return graphs


def warnings_of(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if "compile" in line]


def test_a_cpu_compiles_nothing(small, tmp_path):
    assert load("digits").recipe.compile == "auto"
    trainer = small_trainer(tmp_path, "stop_after=1")
    trainer.run()
    assert trainer.context.recipe.compile is False
    assert load(str(tmp_path / "recipe.yaml")).recipe.compile is False


@pytest.mark.parametrize("first", ["default", False])
def test_the_length_of_the_whole_run_decides_and_a_part_follows_its_first(
    compiles, tmp_path, monkeypatch, first
):
    # Of 8 steps in 3 micro-batches.
    monkeypatch.setattr(device, "LEAST_PASSES", 24 if first else 25)
    small_trainer(tmp_path, "stop_after=3").run()
    assert load(str(tmp_path / "recipe.yaml")).recipe.compile == first
    state = json.loads(next(tmp_path.glob("checkpoints/*/state.json")).read_text())
    assert state["recipe"]["compile"] == first
    monkeypatch.setattr(device, "LEAST_PASSES", 10**9 if first else 0)
    for key, found in (("compile=auto", first), ("compile=max-autotune", "max-autotune")):
        again = small_trainer(tmp_path, "resume=true", key)
        assert again.context.recipe.compile == found


def test_batch_norm_that_communicates_is_not_compiled(compiles, tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    timeline = small_trainer(tmp_path).timeline
    cpu = torch.device("cpu")
    assert device._chosen(None, timeline, model, cpu) is False
    assert device._chosen(None, timeline, model[0], cpu) == "default"


def test_a_device_that_cannot_compile_is_one_warning(compiles, tmp_path, monkeypatch, capsys):
    def fails(*_, **__):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", fails)
        trainer = small_trainer(tmp_path, "stop_after=1")
    trainer.run()
    assert trainer.context.recipe.compile is False
    (line,) = warnings_of(capsys)
    assert line.endswith("nothing: RuntimeError: Failed to find C compiler.")


@pytest.mark.slow("compiles a network at three image sizes")
def test_each_image_size_has_a_static_graph_in_training_and_one_in_evaluation(compiles, tmp_path):
    keys = ["data.image_size=12", "data.eval_resize=24", "epochs=3", "evaluate_every=1ep"]
    stages = "stages=[{from: 1ep, image_size: 16}, {from: 2ep, image_size: 24}]"
    ours = small_trainer(tmp_path / "compiled", *keys, stages)
    ours.run()
    theirs = small_trainer(tmp_path / "eager", *keys, stages, "compile=false")
    theirs.run()
    assert_same(weights(ours), weights(theirs))
    assert ours.context.recipe.compile == "default"
    shapes = {"training": [], "evaluation": []}
    for graph in (graph for graph in compiles.graphs if "conv2d" in graph.code):
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        inputs = [node.meta["example_value"] for node in nodes]
        assert not any(isinstance(x, torch.SymInt) for x in inputs)
        sizes = [size for x in inputs for size in x.shape]
        assert not any(isinstance(size, torch.SymInt) for size in sizes)
        kind = "training" if "cross_entropy" in graph.code else "evaluation"
        shapes[kind] += [tuple(x.shape) for x in inputs if x.ndim == 4 and x.shape[1] == 3]
    weight = (6, 3, 3, 3)
    images = {kind: [x for x in found if x != weight] for kind, found in shapes.items()}
    assert images["training"] == [(4, 3, 12, 12), (4, 3, 16, 16), (4, 3, 24, 24)]
    assert images["evaluation"] == [(4, 3, 24, 24)]
    assert torch._dynamo.config.recompile_limit >= 2 * 3 + 2
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        assert torch._inductor.config.compile_threads == ours.loader.cores


def on_ranks(photos, run_dir):
    """The weights of a rank after compiled, eager and refused runs, and what was settled."""
    compile, found = torch.compile, []
    rank = torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch, small_networks():
        patch.setattr(torch, "compile", lambda f, **_: compile(f, backend="eager"))
        patch.setattr(device, "DEVICES", ("cpu",))
        patch.setattr(device, "LEAST_PASSES", 0)
        for key, fails in (("auto", None), ("false", None), ("auto", 1)):
            problem = "no gcc" if rank == fails else ""
            patch.setattr(device, "why_it_cannot_compile", lambda _, problem=problem: problem)
            keys = [f"compile={key}", "evaluate_every=1ep", "comm.algorithm=torus"]
            trainer = make(photos, f"{run_dir}/{key}-{fails}", *keys)
            trainer.run()
            found.append((weights(trainer), trainer.context.recipe.compile))
    return found


@pytest.mark.slow("compiles a network on two ranks")
def test_ranks_are_compiled_together_and_compute_as_eager_ones(photos, tmp_path):
    first, second = run_ranks(2, on_ranks, photos, str(tmp_path))
    for rank in (first, second):
        assert [mode for _, mode in rank] == ["default", False, False]
        for trained, _ in rank:
            learned = [name for name in trained if "weight" in name or "bias" in name]
            assert_same({n: trained[n] for n in learned}, {n: first[1][0][n] for n in learned})
