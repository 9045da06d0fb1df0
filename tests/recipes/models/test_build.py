"""Models of recipes, and their residual blocks."""

import pytest
import timm
import torchvision

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.models.build import build_model, residual_blocks
from largebatch.recipes.schema.sections import Model


def test_residual_blocks_are_those_of_torchvision_and_timm_and_other_models_have_none():
    model = torchvision.models.resnet50()
    found = residual_blocks(model)
    assert {*found.values()} == {m.bn3 for m in model.modules() if hasattr(m, "bn3")}
    for name in ("test_convnext", "test_vit", "test_efficientnet", "densenet121"):
        assert residual_blocks(timm.create_model(name)) == {}


def test_the_flagship_is_resnet50_v15():
    model = build_model(Model(name="resnet50"), 1000)
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    assert len(list(model.parameters())) == 161
    assert model.layer2[0].conv2.stride == (2, 2)  # v1.5: the 3 x 3 convolution strides
    # Each block starts as its shortcut (Goyal et al. 2017), which is timm's default.
    assert [norm.weight.any().item() for norm in residual_blocks(model).values()] == [False] * 16


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
        (RESNET | {"args": {"depht": 3}}, "resnet18 does not take {'depht': 3}: TypeErr"),
        (RESNET | {"args": {"act_layer": "foo"}}, "not take {'act_layer': 'foo'}: KeyE"),
    ],
)
def test_unknown_models_and_arguments_are_refused(model, message):
    with pytest.raises(RecipeError, match=message):
        build_model(Model(**model), 10)
