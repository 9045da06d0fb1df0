"""Models of recipes, and zero-initialised norms."""

import pytest
import timm
import torch
import torchvision

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.models.build import build_model, zero_init_last_norm
from largebatch.recipes.schema.sections import Model


@pytest.mark.parametrize("name", ["resnet10t", "seresnet50"])
@pytest.mark.parametrize("wanted", [True, False])
def test_every_residual_block_starts_as_its_shortcut(name, wanted):
    args = {"layers": (1, 1, 2, 1), "channels": (16, 16, 16, 16), "zero_init_last": False}
    model = build_model(Model(name=name, args=args, zero_init_last_norm=wanted), 10).eval()
    blocks = [m for m in model.modules() if hasattr(m, "drop_path") and hasattr(m, "bn2")]
    assert blocks
    for block in blocks:
        x = torch.rand(2, block.conv1.in_channels, 8, 8)
        with torch.no_grad():
            shortcut = x if block.downsample is None else block.downsample(x)
            assert torch.equal(block(x), shortcut.relu()) == wanted


def test_torchvisions_resnet_is_supported_and_other_models_are_unchanged():
    model = torchvision.models.resnet50()
    assert zero_init_last_norm(model) == 16
    zeros = [n for n, p in model.named_parameters() if n.endswith("weight") and not p.any()]
    assert len(zeros) == 16
    assert all(name.endswith("bn3.weight") for name in zeros)
    for name in ("test_convnext", "test_vit", "test_efficientnet", "densenet121"):
        other = timm.create_model(name)
        before = {k: v.clone() for k, v in other.state_dict().items()}
        assert zero_init_last_norm(other) == 0
        assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())


def test_the_flagship_is_resnet50_v15():
    model = build_model(Model(name="resnet50"), 1000)
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    assert len(list(model.parameters())) == 161
    assert model.layer2[0].conv2.stride == (2, 2)  # v1.5: the 3 x 3 convolution strides


ALEXNET, RESNET = {"name": "alexnet_bn"}, {"name": "resnet18"}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name": "resnet50x"}, "model.name: no model 'resnet50x' in timm .*; did you mean"),
        ({"name": "alexnet-bn"}, "did you mean 'alexnet_bn'[?] Valid: airbench, alexnet_bn, resn"),
        ({"name": "?"}, r"no model '[?]' in timm [\d.]+; valid: airbench, .*, one of timm.l"),
        ({"name": "airbench", "args": {"widths": [4, 4]}}, r"widths \[4, 4\]; valid: three pos"),
        (ALEXNET | {"args": {"groups": 3}}, "not take {'groups': 3}: ValueError: groups must be 1"),
        (ALEXNET | {"args": {"order": "bn"}}, "order must be one of relu-norm, norm-relu, not"),
        (ALEXNET | {"args": {"init": "x"}}, "init must be one of gaussian, fan-in, not 'x'"),
        (ALEXNET | {"args": {"img_size": 64}}, "img_size must be at least 67, not 64"),
        (ALEXNET | {"args": {"img_size": 67}}, "zero_init_last_norm: alexnet_bn has no residual"),
        (RESNET | {"args": {"depht": 3}}, "resnet18 does not take {'depht': 3}: TypeErr"),
        (RESNET | {"args": {"act_layer": "foo"}}, "not take {'act_layer': 'foo'}: KeyE"),
        ({"name": "vit_tiny_patch16_224"}, "zero_init_last_norm: .* has no residual block"),
    ],
)
def test_unknown_models_and_arguments_are_refused(model, message):
    with pytest.raises(RecipeError, match=message):
        build_model(Model(**model), 10)
