"""The training step: what is compiled, and what the compiled code may overwrite."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

from largebatch.amp import Precision
from largebatch.lars import LARS
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.evaluate import Meter
from largebatch.recipes.training.step import TrainingStep
from tests.ranks import run_ranks
from tests.recipes.runs import assert_same, make, weights
from tests.recipes.training.small import Small, small, small_networks, small_trainer

__all__ = ["small"]  # a fixture


@pytest.mark.parametrize(
    ("value", "mode"), [("false", None), ("true", "default"), ("max-autotune", "max-autotune")]
)
def test_the_key_gives_the_mode(small, tmp_path, monkeypatch, value, mode):
    """The same mode for forward and loss, and for the model in evaluation."""
    modes = []
    monkeypatch.setattr(
        torch, "compile", lambda f, *, mode, dynamic: modes.append((mode, dynamic)) or f
    )
    assert load("digits", [f"compile={value}"]).recipe.compile_mode == mode
    with pytest.raises(RecipeError, match=r"compile: must be .*true"):
        load("digits", ["compile=fast"])
    small_trainer(tmp_path, f"compile={value}")
    assert modes == ([] if mode is None else [(mode, False)] * 2)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_under_ddp_the_network_and_the_loss_are_compiled(one_rank, monkeypatch):
    torch.compiler.reset()
    graphs, compile = CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile(f, backend=graphs))
    images, labels = torch.randn(8, 3, 12, 12), torch.randint(5, (8,))
    gradients = []
    for mode in (None, "default"):
        torch.manual_seed(3)
        model, precision = Small(5), Precision("bf16")
        ddp = DistributedDataParallel(precision.convert(model), gradient_as_bucket_view=True)
        optimizer = LARS(model.parameters(), 1.0, implementation="foreach")
        step = TrainingStep(model, ddp, optimizer, precision, compile_mode=mode)
        for place in range(3):
            step.forward_backward(images, labels, place, 3)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
    assert ["cross_entropy" in graph.code for graph in graphs.graphs] == [False, True]
    assert "conv2d" in graphs.graphs[0].code


class Overwriting:
    """Stands in for torch.compile in a mode with CUDA graphs (torch._inductor.cudagraph_trees).

    When a new iteration is marked, all that the compiled code returned before has no content:
    losses, logits, and gradients as the backward pass returned them. What autograd adds to
    gradients that were there stays.
    """

    def __init__(self, model):
        self.marks = 0
        self._parameters = list(model.parameters())
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


class Network(nn.Module):
    """A small network; torch.compile leaves out one that is an nn.Sequential itself under DDP."""

    def __init__(self, classes):
        super().__init__()
        self.layers = Small(classes)

    def forward(self, images):
        return self.layers(images)


class Recorder:
    """A backend of torch.compile that runs the graph as it is, and notes its inputs."""

    def __init__(self):
        self.inputs = []

    def __call__(self, graph, inputs, **options):
        self.inputs.append(
            [
                (tuple(x.shape), x.dtype, x.stride()) if isinstance(x, torch.Tensor) else str(x)
                for x in inputs
            ]
        )
        return graph.forward


def compiled_on_ranks(root, run_dir, *keys):
    """The graphs that are compiled before training, and in it."""
    recorder = Recorder()
    compile_it = torch.compile

    def recorded(*arguments, **options):
        return compile_it(*arguments, **options | {"backend": recorder})

    torch.compiler.reset()
    with (
        mock.patch("torch.compile", recorded),
        small_networks(Network),
    ):
        trainer = make(root, run_dir, "compile=true", "evaluate_every=null", *keys)
        before = len(recorder.inputs)
        trainer.run()
    return recorder.inputs[:before], recorder.inputs[before:]


@pytest.mark.slow("compiles a small network on two ranks")
def test_training_is_compiled_once_before_the_first_step(photos, tmp_path):
    """Gradients are reduced in one of two micro-batches only."""
    keys = ["precision=fp16-master", "channels_last=true", "micro_batch_size=4", "stop_after=1"]
    for before, in_training in run_ranks(2, compiled_on_ranks, photos, tmp_path / "run", *keys):
        assert in_training == []
        images = {x for graph in before for x in graph if x[0] == (4, 3, 32, 32)}
        assert images == {((4, 3, 32, 32), torch.float16, (3072, 1, 96, 3))}
