"""Losses, Mixup and CutMix are timm's, and every number of ranks mixes the same images."""

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
from torchvision.transforms import v2

from largebatch.pipeline import ImageFolder, Loader, Stage, Transform
from largebatch.pipeline.order import Stream
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.schema.load import load
from largebatch.recipes.schema.targets import Mixing
from largebatch.recipes.training.build import loss_of
from largebatch.recipes.training.evaluate import Meter
from largebatch.recipes.training.targets import Mixer, draws, training_loss
from largebatch.recipes.training.timeline import timeline_of
from tests.host_reads import NoHostReads
from tests.ranks import run_ranks
from tests.recipes.runs import (
    BASE,
    JOB,
    NO_BATCH_NORM,
    ROUNDING,
    double_precision,
    largest_difference,
    make,
    train,
)


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
    smoothed = timms.mixup_target(labels, 10, 1.0 if own is None else own, smoothing)
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
    of_timm = BinaryCrossEntropy(smoothing, threshold, sum_classes=sum_classes)
    dense = labels if own is None else timms.mixup_target(labels, 10, own, smoothing)
    wanted = of_timm(logits, dense)
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


# --- mixing ------------------------------------------------------------------------------------

BOTH = Mixing(mixup=0.4, cutmix=1.0, group=8)


def mixer(options, position=0, seed=0):
    source = SimpleNamespace(classes=range(10))
    return Mixer(
        options, seed, SimpleNamespace(batch_position=position, source=source, device="cpu")
    )


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
@given(
    repeats=st.integers(1, 4),
    more=st.integers(0, 3),
    images=st.integers(17, 60),
    seed=st.integers(0, 9),
)
def test_repeats_of_an_image_are_not_mixed_with_one_another(repeats, more, images, seed):
    """In any epoch, of any number of images: partners are half a group apart."""
    group, stream = 2 * (repeats + more), Stream(images, seed, repeats=repeats)
    shown, _ = stream.take(0, 6 * images // group * group)
    labels = torch.arange(len(shown))
    classes = SimpleNamespace(classes=labels)
    loader = SimpleNamespace(batch_position=0, source=classes, device="cpu")
    mix = Mixer(Mixing(mixup=1.0, group=group), seed, loader)
    _, targets = mix(torch.zeros(len(shown), 1, 2, 2), labels)
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


def weights_of_torchvision(mixup, cutmix, count):
    torch.manual_seed(1)
    classes = {"num_classes": 2}
    one = v2.CutMix(alpha=cutmix, **classes) if cutmix else v2.MixUp(alpha=mixup, **classes)
    images, labels = torch.zeros(2, 1, 96, 96), torch.tensor([0, 1])
    for _ in range(count):
        yield one(images, labels)[1][0, 0].item()


@pytest.mark.parametrize(
    ("library", "alphas"),
    [
        (weights_of_timm, (0.8, 0)),
        (weights_of_timm, (0, 1.0)),
        (weights_of_timm, (0.1, 1.0)),
        (weights_of_torchvision, (0.2, 0)),
        (weights_of_torchvision, (0, 1.0)),
    ],
)
def test_weights_are_distributed_as_in_the_libraries(library, alphas):
    theirs = [*library(*alphas, 2000)]
    options = Mixing(mixup=alphas[0], cutmix=alphas[1])
    ours = draws(options, 0, 0, 40_000, 96, 96)[:, 5].astype(float)
    # FP32 rounds weights that are all but 0 or 1.
    found = stats.ks_2samp(np.clip(ours, 1e-3, 1 - 1e-3), np.clip(theirs, 1e-3, 1 - 1e-3))
    assert found.pvalue > 0.01


def test_expectations_of_the_draws():
    """Shares of a label below a threshold of 0.2, weights before and after the box is clipped."""

    def drawn(count=50_000, **options):
        return draws(Mixing(**options), 3, 0, count, 224, 224).T

    for alpha, dropped in ((0.1, 0.88), (0.2, 0.79), (0.8, 0.46)):
        own = drawn(mixup=alpha)[5]
        assert own.mean() == pytest.approx(0.5, abs=0.01)
        assert np.mean(np.minimum(own, 1 - own) <= 0.2) == pytest.approx(dropped, abs=0.01)
    top, bottom, left, right, _, own = drawn(cutmix=1.0)
    assert own.mean() == pytest.approx(0.68, abs=0.005)
    assert np.mean(np.minimum(own, 1 - own) <= 0.2) == pytest.approx(0.31, abs=0.01)
    assert own == pytest.approx(1 - (bottom - top) * (right - left) / 224**2, abs=1e-6)
    clear = (left > 0) & (right < 224)  # of any width, as in timm; torchvision's are even
    assert np.mean((right - left)[clear] % 2) == pytest.approx(0.5, abs=0.02)
    both = drawn(mixup=1.0, cutmix=1.0)
    assert np.mean(both[4] == 0) == pytest.approx(0.5, abs=0.01)


def test_draws_stay_the_same():
    """A run that another version resumes goes on as it began."""
    found = draws(Mixing(mixup=0.2, cutmix=1.0), 7, 10**10, 3, 32, 24)
    wanted = [
        [12, 32, 0, 14, 0.0, 0.6354],
        [0, 32, 0, 24, 0.9853, 0.9853],
        [0, 32, 0, 24, 0.1433, 0.1433],
    ]
    assert found == pytest.approx(np.array(wanted), abs=1e-4)


@settings(max_examples=30)
@given(
    world_size=st.sampled_from([2, 3]),
    micro=st.sampled_from([4, 8]),
    seed=st.integers(0, 2**63 - 1),
)
def test_positions_are_mixed_alike_on_any_ranks(world_size, micro, seed):
    images, labels = torch.rand(48, 1, 6, 6), torch.arange(48) % 10
    options = Mixing(mixup=1.0, cutmix=1.0, group=4)
    whole = mixer(options, 96, seed)(images, labels)
    for rank in range(world_size):
        for start in range(rank * micro, 48, micro * world_size):
            part = slice(start, start + micro)
            found = mixer(options, 96 + start, seed)(images[part], labels[part])
            assert all(torch.equal(a, b[part]) for a, b in zip(found, whole, strict=True))


def delivered(root, world_size, rank, micro, resumed=False):
    """What a loader says of where its batches begin, with their labels, and across a stage."""
    loader = Loader(
        ImageFolder(root, "train"), Transform(image_size=16), batch_size=24, rank=rank,
        micro_batch_size=micro, world_size=world_size, epochs=2, backend="torchvision", threads=1,
        stages=[Stage(1, batch_size=48, micro_batch_size=2 * micro)],
    )  # fmt: skip
    if resumed:
        loader.load_state_dict({**loader.state_dict(), "position": 24})
    return {loader.batch_position + i: y for batch in loader for i, y in enumerate(batch.labels)}


def test_a_loader_says_where_its_batches_begin(photos):
    whole = delivered(photos, 1, 0, 24)
    assert sorted(whole) == [*range(96)]
    assert delivered(photos, 1, 0, 4, resumed=True) == {k: whole[k] for k in range(24, 96)}
    ranks = [delivered(photos, 2, rank, 4) for rank in (0, 1)]
    assert ranks[0] | ranks[1] == whole
    assert not ranks[0].keys() & ranks[1].keys()


MIXED = ["mixing.mixup=0.2", "mixing.cutmix=1"]


def in_double(root, folder, *keys):
    with double_precision():
        return train(root, folder, *keys)


@pytest.mark.slow("trains on batches of 256, also on two ranks")
def test_accumulation_and_ranks_make_the_updates_of_one_batch(photos, tmp_path):
    keys = [*NO_BATCH_NORM, *MIXED, "batch_size=256", "epochs=10", "evaluate_every=null"]
    keys += ["optimizer.lr=0.1", "stop_after=2", "schedule.warmup=0", "label_smoothing=0.1"]
    at_once = in_double(photos, tmp_path / "1", *keys, "micro_batch_size=256")
    parts = in_double(photos, tmp_path / "8", *keys, "micro_batch_size=32")
    assert largest_difference(parts, at_once) < ROUNDING
    two = run_ranks(2, in_double, photos, tmp_path / "2", *keys, "micro_batch_size=64")
    assert largest_difference(two[0], at_once) < ROUNDING
    keys += ["mixing.mixup=0", "mixing.cutmix=0", "micro_batch_size=256"]
    plain = in_double(photos, tmp_path / "plain", *keys)
    assert largest_difference(plain, at_once) > 1e-3


@pytest.mark.slow("trains for 90 updates")
def test_a_network_learns_the_digits_from_mixed_and_augmented_repeats(digits, tmp_path):
    """With seed 0 it names 88 % of 360 other digits; chance is 10 %."""
    keys = [*MIXED, "loss.name=binary-cross-entropy", "loss.threshold=0.2", "loss.sum_classes=true"]
    keys += ["label_smoothing=0.1", "data.auto_augment=rand-m3-inc1", "data.repeats=2"]
    keys += ["data.flip=0", "data.image_size=16", "data.eval_resize=16"]
    keys += ["batch_size=64", "micro_batch_size=32", "optimizer.lr=2", "epochs=4"]
    assert make(digits, tmp_path, *keys, "evaluate_every=4ep").run()["top1"] > 60


def test_training_accuracy_is_against_the_label_of_the_larger_weight():
    meter = Meter(JOB.device)
    logits = torch.eye(10)[[3, 3, 5]]
    targets = 0.6 * torch.eye(10)[[3, 4, 5]] + 0.4 * torch.eye(10)[[4, 3, 5]]
    meter.add(torch.tensor(1.0), logits, targets)
    values, images = meter.read(JOB)
    assert (values["top1"], images) == (pytest.approx(200 / 3), 3)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["mixing.group=3"], "mixing.group: 3 images do not pair up; valid: an even number"),
        (
            ["mixing.mixup=0.2", "batch_size=48", "micro_batch_size=24"],
            "mixing.group: 32 does not divide a micro-batch of 24; valid: an even divisor of it",
        ),
        (
            ["mixing.cutmix=1", "batch_size=64", "micro_batch_size=null"],
            "mixing.group: 32 does not divide a micro-batch of 16; valid: an even divisor of it",
        ),
        (["loss.threshold=0.2"], "loss.threshold: only for name binary-cross-entropy; valid with"),
        (["loss.name=mse"], "loss.name: "),
    ],
)
def test_keys_that_do_not_fit_are_refused_in_one_line(keys, message):
    with pytest.raises(RecipeError) as error:
        timeline_of(load("digits", [*BASE, *keys]).recipe, 1000, world_size=4)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
