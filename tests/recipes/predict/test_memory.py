"""The memory of a step: what is counted, against tensors that exist."""

import gc
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from largebatch.amp import PRECISIONS, Precision
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.models.optimizers import build_optimizer
from largebatch.recipes.predict.memory import MemoryCounter, meta_model
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.build import loss_of
from largebatch.recipes.training.evaluate import WeightAverage
from largebatch.recipes.training.step import TrainingStep
from largebatch.recipes.training.targets import Mixer

BASE = [
    *("model.name=test_resnet", "data.image_size=32", "data.eval_resize=32", "device=cpu"),
    *("batch_size=16", "micro_batch_size=8", "schedule.warmup=0"),
]


def counter(*keys, model=None):
    found = MemoryCounter(load("digits", [*BASE, *keys]).recipe, 10)
    found.model = found.model if model is None else model
    return found


def layers():
    """Linear layers of 300 x 1000, 1000 x 500 and 500 x 10 without bias, ReLU between them."""
    sizes = (300, 1000), (1000, 500), (500, 10)
    first, second, third = (nn.Linear(*size, bias=False) for size in sizes)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), third)


@pytest.mark.parametrize(
    ("precision", "accumulation", "keys"),
    [
        ("fp32", 2, ["optimizer.name=lars", "ema.decay=0.9"]),
        ("bf16-master", 1, ["optimizer.name=muon"]),
        ("bf16", 2, ["optimizer.name=adamw"]),
        ("fp32", 1, ["optimizer.name=sgd", "mixing.mixup=0.2", "mixing.group=8"]),
    ],
)
def test_the_peak_is_what_the_allocator_gives(precision, accumulation, keys, tmp_path):
    """The CPU allocator's own record of real steps, in which matrix products take no workspace."""
    recipe = load("digits", [*BASE, *keys, f"precision={precision}", "loss_scale=none"]).recipe
    counted = counter(*keys, model=layers()).count(precision, 64, 10, accumulation=accumulation)
    gc.collect()  # what others left is not freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        form = Precision(precision, loss_scale="none")
        model = form.convert(layers())
        optimizer = build_optimizer(recipe, model)
        step = TrainingStep(model, None, optimizer, form, loss=loss_of(recipe))
        decay = recipe.ema.decay
        average = None if decay is None else WeightAverage(model, optimizer, decay)
        batch = images, labels = torch.randn(64, 3, 10, 10), torch.zeros(64).long()
        if recipe.mixing.is_on:  # beside the loader's batch
            source = SimpleNamespace(classes=range(10))
            loader = SimpleNamespace(batch_position=0, device="cpu", source=source)
            images, labels = Mixer(recipe.mixing, 0, loader)(*batch)
        for _ in range(2):
            for place in range(accumulation):
                step.forward_backward(images, labels, place, accumulation)
            step.update()
            optimizer.zero_grad(set_to_none=True)
            if average is not None:
                average.update()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    now = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    assert abs(peak - counted.peak) < 4096  # logits, losses and rates of a step


def test_tied_and_frozen_weights_and_a_module_within_itself_are_counted():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.out = nn.Linear(300, 300, False), nn.Linear(300, 10, False)
            self.second = nn.Linear(300, 300, False)
            self.second.weight = self.first.weight

        def forward(self, x, deep=1):
            x = self.second(self.first(x.flatten(1)))
            return self(x, deep - 1) if deep else self.out(x)

    model = Again()
    found = counter("optimizer.name=sgd", model=model).count("fp32", 8, 10)
    assert found.parameters == found.gradients == found.state == 4 * (300 * 300 + 300 * 10)
    model.first.weight.requires_grad_(False)
    frozen = counter("optimizer.name=sgd", model=model).count("fp32", 8, 10)
    assert frozen.parameters == found.parameters
    assert frozen.gradients == frozen.state == 4 * 300 * 10
    assert frozen.peak < found.peak - 4 * 300 * 300


@pytest.mark.parametrize(
    ("optimizer", "precision", "state", "of_norm"),
    [("lars", "fp16-pure", 2, 4), ("sgd", "bf16-master", 8, 4), ("adamw", "bf16", 8, 8)],
)
def test_fixed_parts_are_those_of_the_rule(optimizer, precision, state, of_norm):
    """Bytes per parameter; norm layers stay in FP32 and have no masters."""
    key = f"optimizer.name={optimizer}"
    model = meta_model(load("digits", BASE).recipe, 10)
    found = counter(key, "ema.decay=0.9").count(precision, 8, 32)
    norms = {p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
    half = PRECISIONS[precision].parameters.itemsize
    others = sum(p.numel() for p in model.parameters() if p not in norms)
    of_norms = sum(p.numel() for p in norms)
    assert found.gradients == half * others + 4 * of_norms
    buffers = found.parameters - found.gradients
    assert 0 < buffers < 8 * of_norms + 8 * len(norms)
    steps = 4 * len([*model.parameters()]) if optimizer == "adamw" else 0
    assert found.state == state * others + of_norm * of_norms + steps
    # The average of the weights is in full precision.
    floats = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    assert found.ema == 4 * sum(t.numel() for t in floats)
    assert found.peak - counter(key).count(precision, 8, 32).peak == found.ema


def test_gradients_and_buckets_by_ranks_and_accumulation():
    one = counter()
    size, peaks = one.gradient_bytes("fp32"), []
    for ranks, accumulation, gradients in ((1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 2)):
        found = one.count("fp32", 8, 32, ranks=ranks, accumulation=accumulation)
        assert found.gradients == gradients * size
        peaks.append(found.peak)
    assert peaks[0] <= peaks[1] == peaks[2] == peaks[3] - size
    unknown = counter("optimizer.name=Adafactor").count("fp32", 8, 32)  # as numbers decide
    assert unknown.state is None


class ReadsInForward(nn.Linear):
    def __init__(self, num_classes):
        super().__init__(3, num_classes)

    def forward(self, x):
        return super().forward(x.mean((2, 3))) * float(x.max().item())


def reads_when_made(num_classes):
    return nn.Linear(3, int(torch.ones(()).item()) * num_classes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reads_when_made", "cannot be built on the meta device: Tensor.item"),
        ("ReadsInForward", "8 images of 32 px cannot be counted without numbers: DataDep"),
    ],
)
def test_a_model_that_needs_numbers_is_named(name, message):
    with pytest.raises(RecipeError, match=rf"^model.name: .*{message}.*; valid: a model .*\Z"):
        counter(f"model.name={__name__}:{name}").count("fp32", 8, 32)
