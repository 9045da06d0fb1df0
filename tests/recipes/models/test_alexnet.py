"""AlexNet-BN is the network of nvcaffe's prototxt files and of the paper."""

import math

import pytest
import torch
from torch import nn

from largebatch.lars import split_parameters
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.models.alexnet import AlexNetBN
from tests.recipes.runs import make

# Outputs of conv1 to conv5 (a norm layer has two parameters for each), and all biases.
CHANNELS = [96, 256, 384, 384, 256]
BIASES = sum(CHANNELS) + 4096 + 4096 + 1000


@pytest.fixture(scope="module", autouse=True)
def on_meta():
    """Build networks on the meta device; tests that need values build them on the CPU."""
    with torch.device("meta"):
        yield


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_the_number_of_parameters_is_that_of_the_prototxt():
    # With 2 groups and with 1. The paper states 62 million, which only the second has.
    published, ungrouped = 60_965_224, 62_378_344
    assert count(AlexNetBN(norm_affine=False)) == published
    assert count(AlexNetBN(norm_affine=False, groups=1)) == ungrouped
    # Weights and biases of norm layers: after conv1 to conv4, or after all five.
    assert count(AlexNetBN(groups=1)) == ungrouped + 2 * sum(CHANNELS[:4])
    paper = AlexNetBN(groups=1, bn_after_pool5=True)
    assert count(paper) == ungrouped + 2 * sum(CHANNELS)
    # In the other order, only conv5 of the convolutions has a bias.
    assert count(AlexNetBN(order="norm-relu")) == published - sum(CHANNELS[:4]) + 2 * sum(CHANNELS)
    # The paper's authors state that bias, beta and gamma are 0.02 % of AlexNet's parameters.
    decaying, others = split_parameters(paper, 5e-4)
    assert [(g["weight_decay"], g["adapt"]) for g in (decaying, others)] == [
        (5e-4, True),
        (0.0, False),
    ]
    assert sum(p.numel() for _, p in others["params"]) == BIASES + 2 * sum(CHANNELS)
    assert round(100 * (BIASES + 2 * sum(CHANNELS)) / count(paper), 2) == 0.02


def test_layers_follow_each_other_as_in_the_prototxt():
    def layers(**options):
        return " ".join(name for name, _ in AlexNetBN(**options).features.named_children())

    norm_first = (
        "conv1 relu1 pool1 bn2 conv2 relu2 pool2 bn3 conv3 relu3 bn4 conv4 relu4 bn5 conv5 "
        "relu5 pool5"
    )
    assert layers() == norm_first
    assert layers(bn_after_pool5=True) == f"{norm_first} bn_pool5"
    assert layers(order="norm-relu") == (
        "conv1 bn1 relu1 pool1 conv2 bn2 relu2 pool2 conv3 bn3 relu3 conv4 bn4 relu4 "
        "conv5 bn5 relu5 pool5"
    )
    norms = [m for m in AlexNetBN().modules() if isinstance(m, nn.BatchNorm2d)]
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
    keys += ["data.eval_resize=72"]
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
        gaussian = AlexNetBN(order=order, img_size=67)
        fan_in = AlexNetBN(10, order=order, img_size=67, init="fan-in")
    front = order == "relu-norm"
    biases = {"fc6": 0.1, "fc7": 0.1, "fc8": 0.01 if front else 0.0}
    for model, init in ((gaussian, "gaussian"), (fan_in, "fan-in")):
        for path, layer in model.named_modules():
            if not isinstance(layer, nn.Conv2d | nn.Linear):
                continue
            name, weight = path.rpartition(".")[2], layer.weight.detach()
            std = 0.005 if name in ("fc6", "fc7") else 0.01
            if init == "fan-in" and isinstance(layer, nn.Conv2d):
                std = math.sqrt(2 / weight[0].numel())
            # The std of n samples has a relative error of 1 / sqrt(2 n); allow 5 of it.
            rel = 5 / math.sqrt(2 * weight.numel())
            assert weight.std().item() == pytest.approx(std, rel=rel)
            if layer.bias is not None:
                bias = biases.get(name, 0.01 if front else 0.1)
                assert torch.equal(layer.bias.detach(), torch.full_like(layer.bias, bias))
