"""Counting batches together leaves the same state as layers that count for themselves."""

import copy
from collections import Counter
from contextlib import nullcontext

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import BatchNormAct2d
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from largebatch.amp import PRECISIONS, Precision
from largebatch.lars import LARS
from largebatch.recipes.models.batch_counters import BatchCounters
from largebatch.recipes.models.batch_norm import share_statistics
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
from tests.ranks import run_ranks
from tests.recipes.runs import assert_same, make
from tests.replay import Recording


class Operators(TorchDispatchMode):
    """Counts the operators whose first tensor is one integer, as a counter is."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        first = next(iter(tree_leaves(args)), None)
        if isinstance(first, torch.Tensor) and first.dtype == torch.int64 and first.dim() == 0:
            self.seen[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


class Net(nn.Module):
    """Batch norms of several kinds: frozen, shared, unused, cumulative, without statistics."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.plain = nn.BatchNorm2d(4, momentum=0.3)
        self.act = BatchNormAct2d(4)
        self.twice = nn.BatchNorm2d(4)
        self.cumulative = nn.BatchNorm2d(4, momentum=None)
        self.without = nn.BatchNorm2d(4, track_running_stats=False)
        self.frozen = nn.BatchNorm2d(4)
        self.unused = nn.BatchNorm2d(4)
        self.last = nn.BatchNorm1d(4)
        self.fc = nn.Linear(4, 2)

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        x = self.twice(self.act(self.plain(self.conv(x))))
        x = self.frozen(self.without(self.cumulative(self.twice(x))))
        return self.fc(self.last(x.mean((2, 3))))


def test_resnet_50_counts_with_one_operator_instead_of_53():
    model = timm.create_model("resnet50", num_classes=2)
    counters, images = BatchCounters(model), torch.zeros(2, 3, 32, 32)
    found = []
    for context in (nullcontext, counters.together):
        with torch.no_grad(), Operators() as operators, context():
            model(images)
        found.append(dict(operators.seen))
    assert found == [{"add_": 53}, {"_foreach_add_": 1}]
    counts = [b for name, b in model.named_buffers() if name.endswith("num_batches_tracked")]
    assert [int(count) for count in counts] == [2] * 53


def state_after(modes, precision, together, slices=None, seed=1):
    """Train in some modes, and return everything that training changes."""
    amp = Precision(precision, loss_scale="none" if precision == "fp32" else 1024.0)
    model = amp.convert(Net())
    if slices:
        share_statistics(
            model,
            load("digits", [f"batch_norm.images={slices}"]).recipe,
            Job(0, 1, 1, torch.device("cpu")),
        )
    optimizer = LARS(
        model.parameters(), 0.1, master_weights=amp.form.masters, implementation="foreach"
    )
    counters, generator = BatchCounters(model), torch.Generator().manual_seed(seed)
    for training, overflows in modes:
        model.train(training)
        for _ in range(2):
            images = torch.randn(4, 3, 8, 8, generator=generator)
            with counters.together() if together else nullcontext(), amp.forward():
                loss = model(images).float().square().mean()
            if training:
                amp.backward(loss * (float("inf") if overflows else 1.0))
        if training:
            amp.step(optimizer)
            optimizer.zero_grad()
    assert not any("num_batches_tracked" in module.__dict__ for module in model.modules())
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=4),
    st.sampled_from(sorted(PRECISIONS)),
    st.sampled_from([None, 2]),
)
def test_the_state_is_that_of_layers_that_count_for_themselves(modes, precision, slices):
    """Also where steps are skipped, layers are frozen, run twice or not at all."""
    if precision.startswith("bf16") or precision == "fp32":
        modes = [(training, False) for training, _ in modes]  # infinite gradients are not skipped
    plain = state_after(modes, precision, False, slices)
    torch.testing.assert_close(
        state_after(modes, precision, True, slices), plain, rtol=0, atol=0, equal_nan=True
    )


def test_a_failing_forward_pass_leaves_the_model_as_it_was():
    model = Net()
    with pytest.raises(RuntimeError), BatchCounters(model).together():
        model(torch.zeros(2, 4, 8, 8))
    assert isinstance(model.plain.num_batches_tracked, torch.Tensor)
    model(torch.zeros(2, 3, 8, 8))
    assert int(model.plain.num_batches_tracked) == 1


def test_a_replay_of_a_forward_pass_counts_again():
    model, images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.ones(2, 3, 8, 8)
    with Recording() as recording, BatchCounters(model).together():
        model(images)
    for _ in range(3):
        recording.replay()
    assert int(model[1].num_batches_tracked) == 4


@pytest.mark.slow("compiles a model")
def test_a_compiled_model_counts_outside_of_its_graph_and_is_compiled_once():
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch.compiler.reset()
    model, plain = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    model.compile(backend=backend, fullgraph=True)
    counters, images = BatchCounters(model), torch.randn(4, 3, 8, 8)
    for _ in range(3):
        with counters.together():
            model(images)
        plain(images)
    assert len(graphs) == 1
    assert not any("add_" in target for target in graphs[0])
    assert_same(model.state_dict(), plain.state_dict())


def counts_on_ranks(overrides):
    model, job = Net(), Job(torch.distributed.get_rank(), 2, 2, torch.device("cpu"))
    del model.frozen  # in evaluation mode a shared layer has nothing to share
    model.frozen = nn.Identity()
    share_statistics(model, load("digits", overrides).recipe, job)
    counters = BatchCounters(model)
    plain = copy.deepcopy(model)
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(job.rank))
    for _ in range(3):
        with counters.together():
            model(images)
        plain(images)
    assert_same(model.state_dict(), plain.state_dict())
    return int(model.plain.num_batches_tracked)


@pytest.mark.slow("starts two ranks")
@pytest.mark.parametrize("overrides", [["batch_norm.ranks=all"], ["batch_norm.ranks=2"]])
def test_layers_that_share_statistics_over_ranks_count_alike(overrides):
    assert run_ranks(2, counts_on_ranks, overrides) == [3, 3]


def test_the_trainer_counts_every_micro_batch_with_one_operator(photos, tmp_path):
    trainer = make(photos, tmp_path, "evaluate_every=null")
    passes = []
    trainer.model.register_forward_hook(lambda *_: passes.append(1))
    with Operators() as operators:
        trainer.run()
    state = trainer.model.state_dict()
    of_layers = [int(v) for name, v in state.items() if name.endswith("num_batches_tracked")]
    assert of_layers
    assert set(of_layers) == {len(passes)}
    assert operators.seen["_foreach_add_"] == len(passes)
    assert operators.seen["add_"] == 0
