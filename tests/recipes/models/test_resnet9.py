"""ResNet-9 is the network of its source, except for the widths."""

import pytest
import torch

from largebatch.recipes.models.build import build_model
from largebatch.recipes.schema.sections import Model


def build(zero_init_last_norm=True, **args):
    section = Model(name="resnet9", args=args, zero_init_last_norm=zero_init_last_norm)
    return build_model(section, 10)


@pytest.mark.parametrize(("width", "parameters"), [(16, 412_954), (32, 1_646_122), (64, 6_573_130)])
def test_the_number_of_parameters(width, parameters):
    convolutions = [(3, 1), (1, 2), (2, 2), (2, 2), (2, 4), (4, 8), (8, 8), (8, 8)]
    widths = [(3 if a == 3 else a * width, b * width) for a, b in convolutions]
    counted = sum(9 * a * b + 2 * b for a, b in widths) + 8 * width * 10 + 10
    model = build(width=width)
    assert sum(p.numel() for p in model.parameters()) == counted == parameters


@pytest.mark.parametrize(("stem_stride", "size"), [(1, 16), (2, 24)])
def test_it_takes_images_of_any_size(stem_stride, size):
    model = build(width=4, stem_stride=stem_stride)
    assert model(torch.rand(2, 3, size, size)).shape == (2, 10)


def test_its_blocks_start_as_the_identity():
    torch.manual_seed(0)
    maps = torch.rand(2, 8, 6, 6)
    assert torch.equal(build(width=4).layer1[2](maps), maps)
    assert not torch.equal(build(zero_init_last_norm=False, width=4).layer1[2](maps), maps)
