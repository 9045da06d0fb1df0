"""Compilation: whether a run is compiled, which graphs there are, and what they overwrite."""

import json

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from largebatch.pipeline import Phase, Stage, lay_out
from largebatch.recipes.schema.load import load
from largebatch.recipes.training import device
from largebatch.recipes.training.evaluate import Meter
from tests.ranks import run_ranks
from tests.recipes.runs import assert_same, make, weights
from tests.recipes.training.small import small_networks, small_trainer

BATCHES = st.lists(st.sampled_from([8, 16, 32]), min_size=1, max_size=3)


@given(st.sampled_from([1, 2, 4]), BATCHES, st.integers(60, 200), st.integers(3, 5))
def test_passes_are_those_of_every_step_of_the_whole_run(ranks, batches, images, epochs):
    first, *later = batches
    stages = [Stage(n, batch_size=batch, micro_batch_size=2) for n, batch in enumerate(later, 1)]
    run = lay_out(Phase(0, 12, first, 2), stages, images=images, world_size=ranks, epochs=epochs)
    phases = (run.phases[run.phase_index(step)] for step in range(run.total_steps))
    assert device.passes(run) == sum(phase.accumulation(ranks) for phase in phases)


@pytest.fixture
def compiles(small, monkeypatch):
    """Let ``auto`` compile on the CPU, whatever the length of a run, by a backend that counts."""
    graphs, compile = CompileCounterWithBackend("eager"), torch.compile
    torch.compiler.reset()
    monkeypatch.setattr(device, "DEVICES", ("cpu",))
    monkeypatch.setattr(device, "LEAST_PASSES", 0)
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile(f, backend=graphs, dynamic=False))
    return graphs


def inputs_of(graph):
    """The inputs that a graph was compiled for, without their numbers."""
    return [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]


@pytest.mark.parametrize(
    ("value", "mode"), [("false", None), ("true", "default"), ("max-autotune", "max-autotune")]
)
def test_the_key_gives_the_mode_of_training_and_of_evaluation(
    small, tmp_path, monkeypatch, value, mode
):
    modes = []
    monkeypatch.setattr(torch, "compile", lambda f, **options: modes.append(options) or f)
    assert load("digits", [f"compile={value}"]).recipe.compile_mode == mode
    small_trainer(tmp_path, f"compile={value}")
    assert modes == ([] if mode is None else [{"mode": mode, "dynamic": False}] * 2)


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
    model, cpu = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), torch.device("cpu")
    timeline = small_trainer(tmp_path).timeline
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
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "compile" in line)
    assert line.endswith("nothing: RuntimeError: Failed to find C compiler.")


@pytest.mark.slow("compiles a network at three image sizes")
def test_each_image_size_has_a_static_graph_in_training_and_one_in_evaluation(compiles, tmp_path):
    keys = ["data.image_size=12", "data.eval_resize=24", "epochs=3", "evaluate_every=1ep"]
    keys.append("stages=[{from: 1ep, image_size: 16}, {from: 2ep, image_size: 24}]")
    ours = small_trainer(tmp_path / "compiled", *keys)
    ours.run()
    theirs = small_trainer(tmp_path / "eager", *keys, "compile=false")
    theirs.run()
    assert_same(weights(ours), weights(theirs))
    assert ours.context.recipe.compile == "default"
    images = {True: [], False: []}  # by whether it is of training
    for graph in (graph for graph in compiles.graphs if "conv2d" in graph.code):
        shapes = (tuple(x.shape) for x in inputs_of(graph) if x.ndim == 4 and x.shape[1] == 3)
        images["cross_entropy" in graph.code] += [x for x in shapes if x != (6, 3, 3, 3)]
    assert images[True] == [(4, 3, 12, 12), (4, 3, 16, 16), (4, 3, 24, 24)]
    assert images[False] == [(4, 3, 24, 24)]
    assert torch._dynamo.config.recompile_limit >= 2 * 3 + 2


class Overwriting:
    """Stands in for torch.compile in a mode with CUDA graphs (torch._inductor.cudagraph_trees).

    When a new iteration is marked, losses, logits and gradients that the compiled code returned
    before have no content. What autograd adds to gradients that were there stays.
    """

    def __init__(self, model):
        self.marks, self._parameters = 0, list(model.parameters())
        self._returned, self._held = [], {}
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter):
        if self._held.get(parameter) != parameter.grad.data_ptr():
            self._returned.append(parameter.grad)

    def compile(self, forward):
        def compiled(images, labels):
            self._held = {p: p.grad.data_ptr() for p in self._parameters if p.grad is not None}
            outputs = forward(images, labels)
            self._returned += [output.detach() for output in outputs]
            return outputs

        return compiled

    def mark(self):
        self.marks += 1
        for tensor in self._returned:
            tensor.fill_(torch.nan)
        self._returned.clear()


@pytest.mark.parametrize(("mode", "micro_batch"), [("reduce-overhead", 4), ("max-autotune", 12)])
def test_graphs_of_torch_compile_overwrite_nothing_that_is_used(
    small, tmp_path, monkeypatch, mode, micro_batch
):
    keys = [f"micro_batch_size={micro_batch}", "optimizer.clip_grad_norm=0.5"]
    results = []
    for compile in ("false", mode):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", lambda f, **_: f)
            trainer = small_trainer(tmp_path / compile, *keys, f"compile={compile}")
        overwriting = Overwriting(trainer.model)
        step = trainer._take_step
        step._forward = overwriting.compile(step._forward)
        monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", overwriting.mark)
        meter, batches = Meter(trainer.job.device), iter(trainer.loader)
        for _ in range(3):
            trainer._update(batches, meter)
            trainer.step += 1
        results.append((weights(trainer), meter.read(trainer.job), overwriting.marks))
    (plain, values, marks), (ours, read, begun) = results
    assert_same(ours, plain)
    assert read == values
    assert (marks, begun) == (0, 3 * 12 // micro_batch)


# --- on ranks ----------------------------------------------------------------------------------


def on_ranks(photos, run_dir):
    """Of a rank's compiled, eager and refused runs: weights, what was settled, and graphs.

    How many there are of the loss before the first step, and how many are made in training.
    """
    compile, found = torch.compile, []
    keys = ["precision=fp16-master", "channels_last=true", "comm.algorithm=torus"]
    keys += ["evaluate_every=null", "stop_after=2"]
    with pytest.MonkeyPatch.context() as patch, small_networks():
        patch.setattr(device, "DEVICES", ("cpu",))
        patch.setattr(device, "LEAST_PASSES", 0)
        for key, fails in (("auto", None), ("false", None), ("auto", 1)):
            made = CompileCounterWithBackend("eager")
            patch.setattr(torch, "compile", lambda f, made=made, **_: compile(f, backend=made))
            problem = "no gcc" if dist.get_rank() == fails else ""
            patch.setattr(device, "why_it_cannot_compile", lambda _, problem=problem: problem)
            trainer = make(photos, f"{run_dir}/{key}-{fails}", *keys, f"compile={key}")
            before, losses = len(made.graphs), sum("entropy" in g.code for g in made.graphs)
            trainer.run()
            graphs = losses, len(made.graphs) - before
            found.append((weights(trainer), trainer.context.recipe.compile, graphs))
    return found


@pytest.mark.slow("compiles a network on two ranks")
def test_ranks_are_compiled_together_before_the_first_step_and_compute_as_eager_ones(
    photos, tmp_path
):
    """The network and the loss; gradients are reduced in one of two micro-batches only."""
    first, second = run_ranks(2, on_ranks, photos, str(tmp_path))
    for rank in (first, second):
        assert [mode for _, mode, *_ in rank] == ["default", False, False]
        assert [graphs for *_, graphs in rank] == [(1, 0), (0, 0), (0, 0)]
        for trained, *_ in rank:
            learned = [name for name in trained if "weight" in name or "bias" in name]
            assert_same({n: trained[n] for n in learned}, {n: first[1][0][n] for n in learned})
