"""convert(): which tensors it casts and which it keeps, on models of several libraries."""

import copy
import pickle
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import timm
import torch
from torch import nn
from transformers.modeling_outputs import ImageClassifierOutput

from largebatch.amp.convert import convert, is_norm
from tests.amp.nets import net_and_batch


class WeightNormLinear(nn.Linear):
    """A linear layer, whatever it is called."""


class PreNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.norm(x))


class MyNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        assert x.dtype == torch.float32
        return x / x.square().mean().sqrt() * self.gain


def test_norm_layers_stay_in_fp32_and_blocks_named_after_them_do_not():
    assert all(map(is_norm, (MyNorm(), nn.SyncBatchNorm(4), nn.RMSNorm(4))))
    assert not any(map(is_norm, (WeightNormLinear(4, 4), PreNorm())))
    model = convert(nn.Sequential(MyNorm(), PreNorm(), WeightNormLinear(4, 4)), torch.float16)
    full = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert full == {"0.gain", "1.norm.weight", "1.norm.bias"}
    half = {name for name, p in model.named_parameters() if p.dtype == torch.float16}
    assert half == {"1.layer.weight", "1.layer.bias", "2.weight", "2.bias"}
    model(torch.randn(2, 4)).sum().backward()


def test_parameters_stay_the_same_objects_and_a_model_can_be_copied_and_pickled():
    model, x, _ = net_and_batch()
    before = list(model.parameters())
    model = convert(model, torch.bfloat16).eval()
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)


class Buffers(nn.Module):
    def __init__(self, **buffers):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        for buffer in self.buffers():
            x = x + buffer.sum() * 0
        return self.layer(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_buffers_that_half_precision_cannot_hold_keep_their_dtype(dtype):
    beyond_fp16 = torch.float32 if dtype == torch.float16 else dtype
    cases = {  # values, and the dtype that they get
        "mask": (torch.tensor([0.0, -1e9, 1.0, 2.0]), beyond_fp16),
        "blocked": (torch.tensor([0.0, -float("inf"), 1.0, 2.0]), dtype),
        "limit": (torch.tensor(65519.9), dtype),  # rounds to 65504
        "beyond": (torch.tensor(65520.0), beyond_fp16),  # rounds to infinity
        "frequencies": (torch.rand(4, dtype=torch.float64), torch.float64),
        "empty": (torch.zeros(0), dtype),
        "count": (torch.tensor(3), torch.int64),
    }
    buffers = {name: values for name, (values, _) in cases.items()}
    model = convert(Buffers(**buffers), dtype)
    assert {n: (buffers[n], b.dtype) for n, b in model.named_buffers()} == cases
    assert torch.equal(model.frequencies, buffers["frequencies"])
    assert all(b.isinf().sum() == buffers[n].isinf().sum() for n, b in model.named_buffers())
    model = convert(Buffers(mask=buffers["mask"], frequencies=buffers["frequencies"]), dtype)
    assert model(torch.ones(2, 4)).dtype == torch.float32


def test_parameters_that_would_lose_their_value_are_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    for number, layer in enumerate(model):
        layer.double()
        with pytest.raises(ValueError, match=rf"^parameter {number}\.weight is in FP64.*\.float"):
            convert(model, torch.bfloat16)
        model.float()
    model[0].weight.data[0, 0] = 7e4
    message = r"^parameter 0\.weight has values beyond 65504, .*bfloat16"
    with pytest.raises(ValueError, match=message):
        convert(model, torch.float16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(m._forward_pre_hooks for m in model.modules())
    convert(model, torch.bfloat16)
    with pytest.raises(ValueError, match=r"already converted to torch\.bfloat16"):
        convert(model, torch.float16)


@dataclass
class Output:
    logits: torch.Tensor
    extras: dict = field(default_factory=dict)
    loss: torch.Tensor | None = None
    total: torch.Tensor = field(init=False)


class Named(NamedTuple):
    logits: torch.Tensor
    index: int


class Doubled(list):
    def __init__(self, *items):
        super().__init__(items)


def dataclass_of(x):
    output = Output(x, {"x": x})
    output.total = x.sum()
    return output


CONTAINERS = {
    "dataclass": dataclass_of,
    "defaultdict": lambda x: defaultdict(list, logits=x, all=[x]),
    "ModelOutput": lambda x: ImageClassifierOutput(logits=x, hidden_states=(x, x)),
    "named tuple": lambda x: Named(x, 1),
    "list": lambda x: Doubled(x, {"x": (x,)}),
}


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "__dataclass_fields__"):
        value = vars(value)
    items = value.values() if hasattr(value, "items") else value
    items = items if hasattr(items, "__iter__") else ()
    return [tensor for item in items for tensor in tensors_in(item)]


class Echo(nn.Module):
    """Return what it is given, through a half-precision layer."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind, self.seen = nn.Linear(4, 4), kind, None

    def forward(self, inputs):
        self.seen = inputs
        return CONTAINERS[self.kind](self.layer(tensors_in(inputs)[0]))


@pytest.mark.parametrize("kind", CONTAINERS)
def test_inputs_and_outputs_of_every_container_are_cast(kind):
    """What has no floating-point tensor is passed on as it is."""
    model = convert(Echo(kind), torch.float16)
    given = CONTAINERS[kind](torch.ones(2, 4))
    output = model(given)
    assert type(output) is type(given) is type(model.seen)
    assert {t.dtype for t in tensors_in(model.seen)} == {torch.float16}
    assert {t.dtype for t in tensors_in(output)} == {torch.float32}
    assert len(tensors_in(output)) == len(tensors_in(given)) == len(tensors_in(model.seen))
    assert {t.dtype for t in tensors_in(given)} == {torch.float32}  # a copy was cast
    if kind == "defaultdict":
        assert output["new"] == []
    if kind == "ModelOutput":
        assert output.logits is output["logits"] is output[0]
        assert output.hidden_states[1].dtype == torch.float32
        assert output.loss is None
    size, index = torch.Size([3]), defaultdict(int, a=torch.arange(3))
    model([torch.ones(2, 4), (size, index)])
    assert model.seen[1][0] is size
    assert model.seen[1][1] is index


@pytest.mark.parametrize("cast", ["float", "bfloat16", "half"])
def test_a_converted_model_that_is_cast_works_in_its_new_dtype(cast):
    net, x, _ = net_and_batch(4)
    expected = net.eval()(x)
    model = convert(net, torch.float16)
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    getattr(model, cast)()
    output = model(x)
    assert output.dtype == torch.float32
    tolerance = 3e-2 if cast == "bfloat16" else 5e-3  # the weights have been rounded
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    model.train()(x).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {getattr(torch, cast)}
    if cast == "float":  # it may be converted again
        convert(model, torch.bfloat16)
        assert model.fc.weight.dtype == torch.bfloat16
        assert model(x).dtype == torch.float32
        found = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
        assert found == hooks


def test_parts_of_timm_models_take_fp32_inputs():
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=4, img_size=32).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        features = model.forward_features(x)
        expected = model.forward_head(features), model.forward_intermediates(x)[1][-1]
        convert(model, torch.bfloat16)
        ours = model.forward_features(x)
        assert ours.dtype in (torch.bfloat16, torch.float32)
        again = model.forward_head(ours), model.forward_intermediates(x)[1][-1]
        head = model.forward_head(features)
    for value, theirs in zip((ours, *again, head), (features, *expected, expected[0]), strict=True):
        torch.testing.assert_close(value.float(), theirs, rtol=0.1, atol=0.1)
