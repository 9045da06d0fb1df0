"""The memory of a step: what is counted, against tensors that exist and against a process."""

import sys

import pytest
import torch
from torch import nn

from benchmarks.recipes.plan_memory import BOUND, SHORT, measured, predicted
from largebatch.amp import PRECISIONS
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.live_storage import LiveStorage, count_pass
from largebatch.recipes.training.memory import MemoryCounter, meta_model
from tests.recipes.runs import NO_BATCH_NORM

BASE = [
    "model.name=test_resnet",
    "data.image_size=32",
    "data.eval_resize=32",
    "batch_size=16",
    "micro_batch_size=8",
    "device=cpu",
    "schedule.warmup=0",
]


def counter(*keys):
    return MemoryCounter(load("digits", [*BASE, *keys]).recipe, 10)


def real(*keys):
    with torch.device("meta"):
        return meta_model(load("digits", [*BASE, *keys]).recipe, 10)


def layers():
    """Two linear layers of 1,000 x 1,000 and 1,000 x 10 without bias, ReLU between them."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(1000, 1000, False), nn.ReLU(), nn.Linear(1000, 10, False)
        )
    return model


def test_a_pass_is_counted_tensor_by_tensor():
    """What autograd keeps of this network is known by heart."""
    n = 64
    found = count_pass(
        layers(),
        (n, 10, 10, 10),
        lambda logits, labels: nn.functional.cross_entropy(logits, labels),
        forward=lambda: torch.autocast("cpu", enabled=False),
    )
    assert found.images == 4 * n * 1000 + 8 * n
    # The first layer's output is freed; ReLU keeps its result; log_softmax and the loss remain.
    assert found.activations == 4 * n * 1000 + 4 * n * 10 + 2 * 4
    assert found.casts == 0
    weights = 4 * (1000 * 1000 + 1000 * 10)
    # At the end of backward the largest gradient is being made, beside that of the hidden layer.
    assert found.peak >= found.images + 4 * 1000 * 1000
    assert found.peak < found.images + found.activations + 1.2 * weights
    assert found.peak_keeping == pytest.approx(found.peak + 4 * 1000 * 10, rel=0.02)


def test_casts_of_autocast_are_told_apart_from_activations():
    found = count_pass(
        layers(),
        (64, 10, 10, 10),
        lambda logits, labels: nn.functional.cross_entropy(logits.float(), labels),
        forward=lambda: torch.autocast("cpu", torch.bfloat16),
    )
    # That of the first layer is freed after forward: its input needs no gradient.
    assert found.casts == 2 * 1000 * 10


def test_activations_grow_in_proportion_to_images():
    one = counter()
    sizes = {n: one.count("fp32", n, 32).activations for n in (8, 16, 24)}
    assert sizes[24] - sizes[16] == sizes[16] - sizes[8] > 0


def test_storage_is_followed_until_it_is_freed():
    weight = torch.zeros(100)
    with LiveStorage([weight]) as live:
        a = weight + 1
        view = a.view(10, 10)
        weight.add_(1)  # in place: nothing new
        assert live.bytes == 400
        b = a.to(torch.float64)
        assert (live.bytes, live.casts) == (1200, 0)
        half = weight.to(torch.float16)
        assert (live.bytes, live.casts) == (1400, 200)
        del a
        assert live.bytes == 1400  # the view holds it
        del view, half
        assert (live.bytes, live.casts) == (800, 0)
        del b
    assert (live.bytes, live.peak) == (0, 1400)


@pytest.mark.parametrize(
    ("keys", "precision", "masters", "state"),
    [
        (["optimizer.name=lars"], "fp32", 0, 4),
        (["optimizer.name=lars", "optimizer.momentum=0"], "fp32", 0, 0),
        (["optimizer.name=lars"], "fp16-master", 4, 4),
        (["optimizer.name=lars"], "fp16-pure", 0, 2),
        (["optimizer.name=sgd"], "bf16-master", 4, 4),
        (["optimizer.name=adamw"], "bf16", 0, 8),
        (["optimizer.name=muon"], "bf16-master", 4, 4),
    ],
)
def test_fixed_parts_are_those_of_the_rule(keys, precision, masters, state):
    """Bytes per parameter; norm layers stay in FP32 and have no masters."""
    found = counter(*keys).count(precision, 8, 32)
    model = real()
    norms = {p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
    half = PRECISIONS[precision].parameters.itemsize
    others = sum(p.numel() for p in model.parameters() if p not in norms)
    of_norms = sum(p.numel() for p in norms)
    assert found.gradients == half * others + 4 * of_norms
    buffers = found.parameters - found.gradients
    assert 0 < buffers < 8 * of_norms + 8 * len(norms)
    assert found.masters == masters * others
    steps = 4 * len([*model.parameters()]) if "adamw" in keys[0] else 0
    in_full = state if half == 4 or masters else 4 * state // 2
    assert found.state == state * others + in_full * of_norms + steps


def test_gradients_and_buckets_by_ranks_and_accumulation():
    one = counter()
    size = one.gradient_bytes("fp32")

    def parts(ranks, accumulation):
        found = one.count("fp32", 8, 32, ranks=ranks, accumulation=accumulation)
        return found.gradients, found.buckets, found.peak

    alone, again, shared, both = (parts(*case) for case in ((1, 1), (1, 2), (2, 1), (2, 2)))
    assert [case[:2] for case in (alone, again, shared, both)] == [
        (size, 0),
        (size, 0),
        (0, size),
        (size, size),
    ]
    assert alone[2] <= again[2] == shared[2] == both[2] - size


def test_the_average_of_weights_is_in_full_precision():
    found = counter("ema.decay=0.9").count("bf16-master", 8, 32)
    plain = counter().count("bf16-master", 8, 32)
    model = real()
    floats = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    assert found.ema == 4 * sum(t.numel() for t in floats)
    assert found.peak - plain.peak == found.ema


def test_state_that_depends_on_numbers_is_unknown():
    assert counter("optimizer.name=Adafactor").count("fp32", 8, 32).state is None


def test_a_transformer_is_counted():
    found = counter(*NO_BATCH_NORM).count("bf16", 8, 32)
    assert found.activations > 0


class ReadsInForward(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.fc = nn.Linear(3, num_classes)

    def forward(self, x):
        return self.fc(x.mean((2, 3))) * float(x.max().item())


def reads_when_made(num_classes):
    return nn.Linear(3, int(torch.ones(()).item()) * num_classes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reads_when_made", "cannot be built on the meta device: RuntimeError: Tensor.item"),
        ("ReadsInForward", "cannot be counted on 8 images of 32 px without numbers: DataDep"),
    ],
)
def test_a_model_that_needs_numbers_is_named(name, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "models_of_a_test", sys.modules[__name__])
    keys = [f"model.name=models_of_a_test:{name}", "model.zero_init_last_norm=false"]
    with pytest.raises(RecipeError, match=message) as raised:
        counter(*keys).count("fp32", 8, 32)
    assert str(raised.value).startswith("model.name: ")
    assert "; valid: a model " in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.slow("trains two networks in processes of their own")
@pytest.mark.parametrize("case", SHORT, ids=str)
def test_the_count_is_near_the_growth_of_a_process(case):
    ratio = predicted(case)["peak"] / measured(case)
    assert 1 / (1 + BOUND) <= ratio <= 1 + BOUND, ratio
