"""convert(): which tensors it casts and which it keeps, on models of several libraries."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

from largebatch.amp import Precision
from largebatch.amp.convert import convert, is_norm
from tests.amp.nets import Net, net_and_batch


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_are_fp32_and_close_to_those_of_the_fp32_model(dtype):
    model, x, _ = net_and_batch()
    expected = model(x)
    model, x, _ = net_and_batch()
    output = convert(model, dtype)(x)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, expected, rtol=0, atol=16 * torch.finfo(dtype).eps)
    assert not torch.equal(output, expected)


def test_parameters_stay_the_same_objects_and_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    before = list(model.parameters())
    convert(model, torch.float16)
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]
    assert model[1].weight is model[0].weight
    assert model[0].weight.dtype == torch.float16


class Tagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs, *, scale, index):
        x = self.layer(inputs["x"]) * scale
        return {"sum": x.sum(), "all": [x, (x, index)]}


def test_inputs_and_outputs_may_be_nested_and_integers_are_left_alone():
    model = convert(Tagged(), torch.bfloat16)
    index = torch.arange(3)
    out = model({"x": torch.ones(2, 4)}, scale=torch.tensor(2.0), index=index)
    assert out["sum"].dtype == out["all"][0].dtype == out["all"][1][0].dtype == torch.float32
    assert out["all"][1][1] is index


class WeightNormLinear(nn.Linear):
    pass


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
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes == {
        "0.gain": torch.float32,
        "1.norm.weight": torch.float32,
        "1.norm.bias": torch.float32,
        "1.layer.weight": torch.float16,
        "1.layer.bias": torch.float16,
        "2.weight": torch.float16,
        "2.bias": torch.float16,
    }
    model(torch.randn(2, 4)).sum().backward()


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("test_resnet", {}),
        ("test_vit", {"img_size": 32}),
        ("test_convnext", {}),
        ("test_efficientnet", {}),
    ],
)
def test_converted_timm_models_run_forward_and_backward(name, args):
    model = Precision("bf16-master").convert(timm.create_model(name, num_classes=4, **args))
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())
    kinds = {p.dtype for p in model.parameters()}
    assert kinds == {torch.bfloat16, torch.float32}


def test_a_converted_model_can_be_copied_and_pickled():
    model, x, _ = net_and_batch()
    model = convert(model, torch.bfloat16).eval()
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)


def test_converting_twice_is_refused():
    model = convert(Net(), torch.bfloat16)
    with pytest.raises(ValueError, match=r"already converted to torch\.bfloat16"):
        convert(model, torch.float16)
