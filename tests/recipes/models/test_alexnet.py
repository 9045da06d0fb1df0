"""AlexNet-BN is the network of nvcaffe's prototxt files and of the paper."""

import math

import pytest
import torch
from torch import nn

from largebatch.lars import split_parameters
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.models.alexnet import AlexNetBN
from tests.recipes.runs import make

# Output channels, input channels per filter and kernel size in the prototxt, for 2 groups and 1.
GROUPED = [(96, 3, 11), (256, 48, 5), (384, 256, 3), (384, 192, 3), (256, 192, 3)]
UNGROUPED = [(96, 3, 11), (256, 96, 5), (384, 256, 3), (384, 384, 3), (256, 384, 3)]
DENSE = [(4096, 256 * 6 * 6), (4096, 4096), (1000, 4096)]
BIASES = 96 + 256 + 384 + 384 + 256 + 4096 + 4096 + 1000


@pytest.fixture(scope="module", autouse=True)
def on_meta():
    """Build networks on the meta device; tests that need values build them on the CPU."""
    with torch.device("meta"):
        yield


def weights(convolutions):
    return sum(out * inputs * k * k for out, inputs, k in convolutions) + sum(
        out * inputs for out, inputs in DENSE
    )


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_the_number_of_parameters_is_that_of_the_layers():
    assert count(AlexNetBN(norm_affine=False)) == weights(GROUPED) + BIASES == 60_965_224
    ungrouped = AlexNetBN(norm_affine=False, groups=1)
    # The paper states 62 million, which only the network without groups has.
    assert count(ungrouped) == weights(UNGROUPED) + BIASES == 62_378_344
    # Weights and biases of norm layers: after conv1 to conv4, or after all five.
    assert count(AlexNetBN(groups=1)) == count(ungrouped) + 2 * (96 + 256 + 384 + 384)
    paper = AlexNetBN(groups=1, bn_after_pool5=True)
    assert count(paper) == count(AlexNetBN(groups=1)) + 2 * 256
    # In the other order, only conv5 of the convolutions has a bias.
    second = AlexNetBN(order="norm-relu")
    assert count(second) == weights(GROUPED) + BIASES + (2 - 1) * (96 + 256 + 384 + 384) + 2 * 256


def test_parameters_without_decay_are_0_02_percent():
    """The paper's authors state that bias, beta and gamma are 0.02 % of AlexNet's parameters."""
    model = AlexNetBN(groups=1, bn_after_pool5=True)
    decaying, others = split_parameters(model, 5e-4)
    assert [(g["weight_decay"], g["adapt"]) for g in (decaying, others)] == [
        (5e-4, True),
        (0.0, False),
    ]
    assert [name for name, _ in decaying["params"]] == [
        *(f"features.conv{i}.weight" for i in range(1, 6)),
        *(f"classifier.fc{i}.weight" for i in (6, 7, 8)),
    ]
    number = sum(p.numel() for _, p in others["params"])
    assert number == BIASES + 2 * (96 + 256 + 384 + 384 + 256)
    assert round(100 * number / count(model), 2) == 0.02


def layers(model):
    return [name for name, _ in model.features.named_children()]


def test_norms_precede_the_next_convolution_or_follow_each():
    plain = "conv1 relu1 pool1 bn2 conv2 relu2 pool2 bn3 conv3 relu3 bn4 conv4 relu4 bn5 conv5"
    norm_first = f"{plain} relu5 pool5".split()
    assert layers(AlexNetBN()) == norm_first
    assert layers(AlexNetBN(bn_after_pool5=True)) == [*norm_first, "bn_pool5"]
    norm_last = AlexNetBN(order="norm-relu")
    wanted = "conv1 bn1 relu1 pool1 conv2 bn2 relu2 pool2 conv3 bn3 relu3 conv4 bn4 relu4 conv5"
    assert layers(norm_last) == f"{wanted} bn5 relu5 pool5".split()
    convolutions = [m for m in norm_last.modules() if isinstance(m, nn.Conv2d)]
    assert [c.bias is not None for c in convolutions] == [False] * 4 + [True]
    norms = [m for m in norm_last.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all((n.eps, n.momentum) == (1e-4, pytest.approx(0.1)) for n in norms)


def test_feature_maps_are_55_27_13_and_6_pixels():
    model, sides = AlexNetBN(bn_after_pool5=True), {}
    for name, layer in model.features.named_children():
        layer.register_forward_hook(
            lambda module, args, out, name=name: sides.__setitem__(name, out.shape[-1])
        )
    assert model(torch.empty(2, 3, 227, 227)).shape == (2, 1000)
    wanted = {"conv1": 55, "pool1": 27, "conv2": 27, "pool2": 13, "conv5": 13, "pool5": 6}
    assert {name: sides[name] for name in wanted} == wanted
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.5, 0.5]


@pytest.mark.parametrize("size", [67, 224])
def test_other_image_sizes_fit_and_a_wrong_one_is_refused(size):
    model = AlexNetBN(10, img_size=size)
    assert model(torch.empty(1, 3, size, size)).shape == (1, 10)
    with pytest.raises(RecipeError, match=rf"images of {size} px, and these have 227 x 227"):
        model(torch.empty(1, 3, 227, 227))


def test_images_of_another_size_are_refused_before_the_run(photos, tmp_path):
    keys = ["model.name=alexnet_bn", "model.args={img_size: 67}", "data.image_size=67"]
    keys += ["data.eval_resize=72", "model.zero_init_last_norm=false"]
    with torch.device("cpu"):
        make(photos, tmp_path / "run", *keys)
    for more in ("data.image_size=70", "data.eval_size=70", "stages=[{from: 1ep, image_size: 70}]"):
        with pytest.raises(RecipeError, match=r"images of 67 px, and the run has images of 70 px"):
            make(photos, tmp_path / "run", *keys, more)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("order", ["relu-norm", "norm-relu"])
def test_initialisation_is_as_published(order):
    with torch.device("cpu"):
        torch.manual_seed(0)
        model = AlexNetBN(order=order, img_size=67)
        fan_in = AlexNetBN(10, order=order, img_size=67, init="fan-in")
    front = order == "relu-norm"
    named = dict(model.features.named_children()) | dict(model.classifier.named_children())
    stds = {"fc6": 0.005, "fc7": 0.005}
    biases = {"fc6": 0.1, "fc7": 0.1, "fc8": 0.01 if front else 0.0}
    for name in [*(f"conv{i}" for i in range(1, 6)), "fc6", "fc7", "fc8"]:
        weight, bias = named[name].weight.detach(), named[name].bias
        # The standard deviation of n samples has a relative error of 1 / sqrt(2 n); allow 5 of it.
        tolerance = 5 / math.sqrt(2 * weight.numel())
        assert weight.std().item() == pytest.approx(stds.get(name, 0.01), rel=tolerance)
        if bias is not None:
            wanted = biases.get(name, 0.01 if front else 0.1)
            assert torch.equal(bias.detach(), torch.full_like(bias, wanted))
    for conv, (_, inputs, kernel) in zip(
        (m for m in fan_in.modules() if isinstance(m, nn.Conv2d)), GROUPED, strict=True
    ):
        tolerance = 5 / math.sqrt(2 * conv.weight.numel())
        wanted = math.sqrt(2 / (inputs * kernel * kernel))
        assert conv.weight.std().item() == pytest.approx(wanted, rel=tolerance)
