"""Airbench: its shape, its first layer, and convolutions that start as identity; and ResNet-9."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from largebatch.lars import split_parameters
from largebatch.recipes.models import airbench
from largebatch.recipes.models.build import build_model
from largebatch.recipes.schema.sections import Model


def airbench_of(**args):
    return build_model(Model(name="airbench", args=args), 10)


@pytest.mark.parametrize(
    ("widths", "size", "mflop"),
    [((64, 256, 256), 32, 707.8), ((32, 64, 64), 24, 54.3), ((16, 64, 64), 32, 59.7)],
)
def test_the_numbers_of_parameters_and_of_operations(widths, size, mflop):
    model = airbench_of(widths=widths)
    pairs = [(24, widths[0]), *pairwise(widths)]
    counted = 24 * 3 * 4 + 24 + widths[-1] * 10
    counted += sum(9 * (i + o) * o + 4 * o for i, o in pairs)
    assert sum(p.numel() for p in model.parameters()) == counted
    with FlopCounterMode(display=False) as counter:
        model(torch.rand(2, 3, size, size)).sum().backward()
    # Multiplications and additions, forward and backward, for each of the two images.
    assert counter.get_total_flops() / 2e6 == pytest.approx(mflop, abs=0.05)


def test_the_first_layer_whitens_the_images_it_was_made_from():
    torch.manual_seed(0)
    smooth = (
        F.avg_pool2d(torch.rand(64, 3, 22, 22), 3, stride=1)
        * torch.tensor([1.0, 2.0, 4.0])[:, None, None]
    )
    model = airbench_of(widths=(4, 4, 4))
    model.init_from_images(smooth)
    outputs = model.whiten(smooth).double().transpose(0, 1).flatten(1)
    one, other = outputs[:12], outputs[12:]
    torch.testing.assert_close(one, -other)
    moments = one @ one.T / one.shape[1]
    # Directions of little variance keep less of it than one, by the constant that is added.
    patches = smooth.double().unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5)
    patches = patches.reshape(-1, 12)
    variances = torch.linalg.eigvalsh(patches.T @ patches / len(patches)).flip(0)
    torch.testing.assert_close(moments, (variances / (variances + 5e-4)).diag(), atol=1e-5, rtol=0)
    assert variances.min() < 5e-3


def test_weights_of_the_first_layer_and_of_norm_layers_are_frozen():
    model = airbench_of(widths=(4, 4, 4))
    trained = {n for g in split_parameters(model, 5e-4) for n, _ in g["params"]}
    frozen = {n for n, _ in model.named_parameters()} - trained
    norms = {f"blocks.{i}.norm{j}.weight" for i in range(3) for j in (1, 2)}
    assert frozen == {"whiten.weight"} | norms


def test_the_first_layer_does_not_depend_on_how_many_images_are_taken_at_once(monkeypatch):
    images = torch.rand(70, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    one, other = airbench_of(widths=(4, 4, 4)), airbench_of(widths=(4, 4, 4))
    one.init_from_images(images)
    monkeypatch.setattr(airbench, "_IMAGES", 16)
    other.init_from_images(images)
    torch.testing.assert_close(one.whiten.weight, other.whiten.weight)


@pytest.mark.parametrize(("widths", "block"), [((32, 8, 8), 0), ((32, 8, 8), 1), ((24, 24, 24), 1)])
def test_convolutions_start_as_the_identity_and_other_channels_at_random(widths, block):
    torch.manual_seed(0)
    found = airbench_of(widths=widths).blocks[block]
    for conv in (found.conv1, found.conv2):
        outputs, inputs = conv.weight.shape[:2]
        maps, kept = torch.rand(2, inputs, 6, 6), min(inputs, outputs)
        torch.testing.assert_close(conv(maps)[:, :kept], maps[:, :kept])
        assert outputs <= inputs or conv.weight[inputs:].std() > 0


# --- ResNet-9, which is the network of its source but for the widths ---------------------------


def resnet9(**args):
    return build_model(Model(name="resnet9", args=args), 10)


@pytest.mark.parametrize(("width", "parameters"), [(16, 412_954), (32, 1_646_122), (64, 6_573_130)])
def test_the_number_of_parameters_of_resnet9_and_images_of_any_size(width, parameters):
    convolutions = [(3, 1), (1, 2), (2, 2), (2, 2), (2, 4), (4, 8), (8, 8), (8, 8)]
    widths = [(3 if a == 3 else a * width, b * width) for a, b in convolutions]
    counted = sum(9 * a * b + 2 * b for a, b in widths) + 8 * width * 10 + 10
    model = resnet9(width=width)
    assert sum(p.numel() for p in model.parameters()) == counted == parameters
    for stem_stride, size in ((1, 16), (2, 24)):
        model = resnet9(width=4, stem_stride=stem_stride)
        assert model(torch.rand(2, 3, size, size)).shape == (2, 10)


def test_the_blocks_of_resnet9_start_as_the_identity():
    torch.manual_seed(0)
    maps = torch.rand(2, 8, 6, 6)
    assert torch.equal(resnet9(width=4).layer1[2](maps), maps)
    assert not torch.equal(resnet9(zero_init_last=False, width=4).layer1[2](maps), maps)
