"""Blur pooling and stochastic depth: timm's through ``model.args``, and the form of FFCV."""

import pytest
import torch
from timm.layers import BlurPool2d, DropPath
from torch import nn

from largebatch.recipes.models.blur_pool import Blur
from largebatch.recipes.models.build import build_model, residual_blocks
from largebatch.recipes.schema.sections import Model

FIRST = [f"layer{stage}.0" for stage in (2, 3, 4)]


def names(model, kind):
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


def test_arguments_of_timm_give_stochastic_depth_and_blur_pooling():
    model = build_model(
        Model(name="resnet50", args={"drop_path_rate": 0.3, "aa_layer": "blurpool"}), 10
    )
    rates = [m.drop_prob for m in model.modules() if isinstance(m, DropPath)]
    assert rates == pytest.approx([0.3 * block / 15 for block in range(1, 16)])
    assert names(model, BlurPool2d) == ["maxpool.1", *(f"{first}.aa" for first in FIRST)]
    assert not any(m.stride == (2, 2) for m in model.layer2.modules() if hasattr(m, "kernel"))


@pytest.mark.parametrize("max_pool", [False, True])
def test_ffcvs_form_blurs_before_the_strided_convolutions(max_pool):
    args = {"max_pool": max_pool, "drop_path_rate": 0.1, "zero_init_last": False}
    model = build_model(Model(name="resnet50_blurpool", args=args), 1000)
    blurs = sorted(f"{first}.{place}.0" for first in FIRST for place in ("conv2", "downsample.0"))
    assert sorted(names(model, Blur)) == blurs + ["maxpool.1"] * max_pool
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    layers = [m for m in model.modules() if not m._modules and hasattr(m, "stride")]
    strided = [m for m in layers if m.stride in (2, (2, 2))]
    assert len(strided) == 8  # the stem, the max pool or its blur, and those that are blurred
    assert len(residual_blocks(model)) == 16
    assert len(names(model, DropPath)) == 15
    assert all((m.weight == 1).all() for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    assert model.eval()(torch.rand(1, 3, 64, 64)).shape == (1, 1000)


def test_the_filter_is_1_2_1_padded_with_zeros():
    image = torch.zeros(1, 2, 4, 4)
    image[0, 1, 0, 0] = 16
    expected = torch.zeros(1, 2, 4, 4)
    expected[0, 1, :2, :2] = torch.tensor([[4.0, 2.0], [2.0, 1.0]])
    assert torch.equal(Blur(2)(image), expected)
    assert torch.equal(Blur(2, stride=2)(image), expected[..., ::2, ::2])
    assert torch.equal(Blur(2).half()(image.half()).float(), expected)
