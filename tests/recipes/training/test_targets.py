"""Losses, Mixup and CutMix are timm's, and every number of ranks mixes the same images."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from timm.data import mixup as timms
from timm.loss import BinaryCrossEntropy

from largebatch.pipeline.order import Stream
from largebatch.recipes.schema.data import Mixing
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.build import loss_of
from largebatch.recipes.training.evaluate import Meter
from largebatch.recipes.training.targets import Mixer, draws, training_loss
from tests.host_reads import NoHostReads
from tests.ranks import run_ranks
from tests.recipes.runs import (
    BASE,
    JOB,
    NO_BATCH_NORM,
    ROUNDING,
    largest_difference,
    train_in_double,
)


def batch(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(16, 10, generator=generator)
    return logits.to(dtype), torch.randint(10, (16,), generator=generator)


def mixed(labels, own):
    """Targets without smoothing, each label with that of the image that is as far from the end."""
    one_hot = F.one_hot(labels, 10).float()
    return own * one_hot + (1 - own) * one_hot.flip(0)


SMOOTHING = pytest.mark.parametrize("smoothing", [0.0, 0.1])


@SMOOTHING
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("own", [None, 0.3])
def test_cross_entropy_is_that_of_smoothed_targets_in_fp32(dtype, smoothing, own):
    logits, labels = batch(dtype)
    found = training_loss(logits, labels if own is None else mixed(labels, own), smoothing)
    smoothed = timms.mixup_target(labels, 10, 1.0 if own is None else own, smoothing)
    wanted = -(smoothed.double() * logits.double().log_softmax(1)).sum(1).mean()
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)


@SMOOTHING
@pytest.mark.parametrize("threshold", [None, 0.0, 0.2])
@pytest.mark.parametrize("sum_classes", [False, True])
@pytest.mark.parametrize("own", [None, 0.3, 0.85])
def test_binary_cross_entropy_is_timms(smoothing, threshold, sum_classes, own):
    logits, labels = batch()
    keys = [f"label_smoothing={smoothing}", "loss.name=binary-cross-entropy"]
    keys += [f"loss.threshold={json.dumps(threshold)}", f"loss.sum_classes={sum_classes}".lower()]
    loss = loss_of(load("digits", [*BASE, *keys]).recipe)
    of_timm = BinaryCrossEntropy(smoothing, threshold, sum_classes=sum_classes)
    dense = labels if own is None else timms.mixup_target(labels, 10, own, smoothing)
    found = loss(logits.half(), labels if own is None else mixed(labels, own))
    assert found.item() == pytest.approx(of_timm(logits, dense).item(), rel=1e-3)
    assert found.dtype == torch.float32


# --- mixing ------------------------------------------------------------------------------------

BOTH = Mixing(mixup=0.4, cutmix=1.0, group=8)


def mixer(options, position=0, seed=0, classes=10):
    loader = {"batch_position": position, "source": SimpleNamespace(classes=range(classes))}
    return Mixer(options, seed, SimpleNamespace(**loader, device="cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_each_group_is_mixed_as_a_batch_of_timm_with_the_same_draws(dtype, form, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(160, 3, 20, 28, generator=generator).to(dtype).to(memory_format=form)
    labels = torch.randint(10, (160,), generator=generator)
    before = images.clone()
    with NoHostReads():
        found, targets = mixer(BOTH, 40)(images, labels)
    assert torch.equal(images, before)  # a loader may deliver the same tensor again
    assert (found.dtype, found.stride()) == (dtype, images.stride())
    kinds = set()
    for place, drawn in enumerate(draws(BOTH, 0, 5, 20, 20, 28)):
        top, bottom, left, right = (int(edge) for edge in drawn[:4])
        inside, own = (float(weight) for weight in drawn[4:])
        whole = (bottom - top, right - left) == (20, 28)
        kinds.add("mixup" if whole else "cutmix")
        timm = timms.Mixup(0.4, 1.0, label_smoothing=0, num_classes=10)
        lam = inside if whole else 0.5
        monkeypatch.setattr(timm, "_params_per_batch", lambda lam=lam, cut=not whole: (lam, cut))
        box = ((top, bottom, left, right), own)
        monkeypatch.setattr(timms, "cutmix_bbox_and_lam", lambda *_, box=box, **__: box)
        part = 8 * place + torch.tensor([0, 1, 2, 3, 7, 6, 5, 4])  # timm pairs first with last
        image, target = timm(images[part].float(), labels[part])
        rounding = 1e-6 if dtype == torch.float32 else 5e-3
        torch.testing.assert_close(found[part].float(), image, rtol=0, atol=rounding)
        torch.testing.assert_close(targets[part], target)
    assert kinds == {"cutmix", "mixup"}


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(17, 60), st.integers(0, 9))
def test_repeats_of_an_image_are_not_mixed_with_one_another(repeats, more, images, seed):
    """In any epoch, of any number of images: partners are half a group apart."""
    group, stream = 2 * (repeats + more), Stream(images, seed, repeats=repeats)
    shown, _ = stream.take(0, 6 * images // group * group)
    mix = mixer(Mixing(mixup=1.0, group=group), 0, seed, classes=len(shown))
    _, targets = mix(torch.zeros(len(shown), 1, 2, 2), torch.arange(len(shown)))
    epochs = np.arange(len(shown)) // repeats * repeats // images  # in which the repeats begin
    for position, partner in targets.fill_diagonal_(0).nonzero().tolist():
        assert epochs[position] != epochs[partner] or shown[position] != shown[partner]
    assert targets.count_nonzero()


def weights_of_timm(mixup, cutmix, count):
    np.random.seed(1)
    timm = timms.Mixup(mixup, cutmix)
    for _ in range(count):
        own, cut = timm._params_per_batch()
        yield timms.cutmix_bbox_and_lam((3, 96, 96), own)[1] if cut else own


@pytest.mark.parametrize("alphas", [(0.8, 0), (0.2, 0), (0, 1.0), (0.1, 1.0)])
def test_weights_are_distributed_as_in_timm(alphas):
    options = Mixing(mixup=alphas[0], cutmix=alphas[1])
    ours = draws(options, 0, 0, 40_000, 96, 96)[:, 5].astype(float)
    theirs = [*weights_of_timm(*alphas, 2000)]
    # FP32 rounds weights that are all but 0 or 1.
    samples = (np.clip(weights, 1e-3, 1 - 1e-3) for weights in (ours, theirs))
    assert stats.ks_2samp(*samples).pvalue > 0.01


@pytest.mark.slow("trains four times, also on two ranks")
def test_accumulation_and_ranks_make_the_updates_of_one_batch(photos, tmp_path):
    """Each position of the stream is mixed alike, also where a stage changes the batch."""
    keys = [*NO_BATCH_NORM, "mixing.mixup=0.2", "mixing.cutmix=1", "mixing.group=4", "stop_after=4"]
    keys += ["stages=[{from: 2, batch_size: 32, lr: keep}]", "evaluate_every=null"]
    keys += ["optimizer.lr=0.1", "schedule.warmup=0", "label_smoothing=0.1"]
    at_once = train_in_double(photos, tmp_path / "1", *keys, "micro_batch_size=16")
    parts = train_in_double(photos, tmp_path / "4", *keys, "micro_batch_size=4")
    assert largest_difference(parts, at_once) < ROUNDING
    two = run_ranks(2, train_in_double, photos, tmp_path / "2", *keys, "micro_batch_size=4")
    assert largest_difference(two[0], at_once) < ROUNDING
    keys += ["mixing.mixup=0", "mixing.cutmix=0", "micro_batch_size=16"]
    plain = train_in_double(photos, tmp_path / "plain", *keys)
    assert largest_difference(plain, at_once) > 1e-3


def test_training_accuracy_is_against_the_label_of_the_larger_weight():
    meter = Meter(JOB.device)
    logits = torch.eye(10)[[3, 3, 5]]
    targets = 0.6 * torch.eye(10)[[3, 4, 5]] + 0.4 * torch.eye(10)[[4, 3, 5]]
    meter.add(torch.tensor(1.0), logits, targets)
    values, images = meter.read(JOB)
    assert (values["top1"], images) == (pytest.approx(200 / 3), 3)
