"""DDP in a run: what is compiled before the first step is what training then uses."""

from unittest import mock

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from tests.recipes.runs import make
from tests.recipes.training.small import Small

pytestmark = pytest.mark.slow("compiles a small network on two ranks")


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


def compiled(root, run_dir, *keys):
    """The graphs that are compiled before training, and in it."""
    recorder = Recorder()
    compile_it = torch.compile

    def recorded(*arguments, **options):
        return compile_it(*arguments, **options | {"backend": recorder})

    torch.compiler.reset()
    with (
        mock.patch("torch.compile", recorded),
        mock.patch("largebatch.recipes.training.build.build_model", lambda _, n: Network(n)),
    ):
        trainer = make(root, run_dir, "compile=true", "evaluate_every=null", *keys)
        before = len(recorder.inputs)
        trainer.run()
    return recorder.inputs[:before], recorder.inputs[before:]


def test_training_is_compiled_once_before_the_first_step(photos, tmp_path):
    """Gradients are reduced in one of two micro-batches only."""
    keys = ["precision=fp16-master", "channels_last=true", "micro_batch_size=4", "stop_after=1"]
    for before, in_training in run_ranks(2, compiled, photos, tmp_path / "run", *keys):
        assert in_training == []
        images = {x for graph in before for x in graph if x[0] == (4, 3, 32, 32)}
        assert images == {((4, 3, 32, 32), torch.float16, (3072, 1, 96, 3))}
