"""The losses of training are timm's, on hard and on mixed targets."""

import pytest
import torch
import torch.nn.functional as F
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy

from largebatch.recipes.schema.load import load
from largebatch.recipes.training.build import loss_of
from largebatch.recipes.training.targets import training_loss
from tests.recipes.runs import BASE


def batch(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(16, 10, generator=generator)
    return logits.to(dtype), torch.randint(10, (16,), generator=generator)


def mixed(labels, own):
    """Targets without smoothing, each label with that of the image that is as far from the end."""
    one_hot = F.one_hot(labels, 10).float()
    return own * one_hot + (1 - own) * one_hot.flip(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("own", [None, 0.3])
def test_cross_entropy_is_that_of_smoothed_targets_in_fp32(dtype, smoothing, own):
    logits, labels = batch(dtype)
    targets = labels if own is None else mixed(labels, own)
    found = training_loss(logits, targets, smoothing)
    smoothed = mixup_target(labels, 10, 1.0 if own is None else own, smoothing)
    wanted = -(smoothed.double() * logits.double().log_softmax(1)).sum(1).mean()
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("threshold", [None, 0.0, 0.2])
@pytest.mark.parametrize("sum_classes", [False, True])
@pytest.mark.parametrize("own", [None, 0.3, 0.85])
def test_binary_cross_entropy_is_timms(smoothing, threshold, sum_classes, own):
    logits, labels = batch()
    keys = [f"label_smoothing={smoothing}", "loss.name=binary-cross-entropy"]
    keys += [f"loss.threshold={'null' if threshold is None else threshold}"]
    keys += [f"loss.sum_classes={str(sum_classes).lower()}"]
    loss = loss_of(load("digits", [*BASE, *keys]).recipe)
    timms = BinaryCrossEntropy(smoothing, threshold, sum_classes=sum_classes)
    dense = labels if own is None else mixup_target(labels, 10, own, smoothing)
    wanted = timms(logits, dense)
    found = loss(logits.half(), labels if own is None else mixed(labels, own))
    assert found.item() == pytest.approx(wanted.item(), rel=1e-3)
    assert found.dtype == torch.float32


def test_a_mixed_and_smoothed_target_has_the_weights_of_its_two_classes():
    """The gradient of cross entropy is the softmax less the target."""
    labels = torch.tensor([2, 7])
    logits = torch.zeros(2, 10, requires_grad=True)
    training_loss(logits, mixed(labels, 0.3), 0.1).backward()
    target = 0.1 - 2 * logits.grad
    assert target[0, [2, 7, 0]].tolist() == pytest.approx([0.28, 0.64, 0.01], rel=1e-5)
    assert target.sum(1).tolist() == pytest.approx([1, 1])
