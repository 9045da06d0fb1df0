"""Automatic augmentation and erasing: those of timm and torchvision, from given numbers."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import pytest
import timm.data.auto_augment as timms
import torch
import torchvision.transforms as torchvisions
from PIL import Image, ImageFilter, ImageOps
from scipy import stats
from timm.data.random_erasing import RandomErasing

from largebatch.pipeline import Transform
from largebatch.pipeline.decode.erasing import rectangles
from largebatch.pipeline.decode.policy import NUMBERS, AutoAugment, policy_of
from largebatch.pipeline.order import uniforms
from tests.conftest import refused
from tests.pipeline.loaders import LEVELS, SMALL, assert_same, loader, take

MEAN = (0.485, 0.456, 0.406)
SEED, COUNT = 5, 8000


def drawn(name, count=COUNT):
    """Operations of ``count`` images, as names and arguments."""
    policy = policy_of(name)
    return [policy.steps(row.tolist()) for row in uniforms(SEED, 0, 0, count, further=True)]


@pytest.fixture
def image():
    """An image with smooth and sharp parts, not square."""
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return small.resize((56, 42), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("level", [0, 3.3, 7, 10])
@pytest.mark.parametrize("increasing", [0, 1])
@pytest.mark.parametrize("negative", [False, True])
def test_each_operation_of_randaugment_is_timms(image, monkeypatch, level, increasing, negative):
    monkeypatch.setattr(timms, "_randomly_negate", lambda value: -value if negative else value)
    policy = policy_of(f"rand-inc{increasing}")
    ours = AutoAugment(f"rand-inc{increasing}", MEAN, "bicubic")
    theirs = timms.rand_augment_choices("", increasing=bool(increasing))
    hparams = {"img_mean": (124, 116, 104), "interpolation": Image.Resampling.BICUBIC}
    for name in theirs:
        operation = timms.AugmentOp(name, 1.0, level, hparams)
        own = name.removesuffix("Increasing")
        argument = policy.argument(own, level, negative)
        found = ours.apply(image, own, argument)
        if (own, argument) == ("Posterize", 0):  # which timm cannot with this Pillow
            assert not np.any(found)
        else:
            assert np.array_equal(found, operation(image)), (name, level)


@pytest.mark.parametrize(
    "name", ["rand-m7-mstd0.5-inc1", "rand-m9-n3-p0.8-mstd101", "rand-m15-mmax20-mstd3"]
)
def test_randaugment_draws_as_timm(name):
    """Chi-squared tests of operations and of their number, and Kolmogorov-Smirnov of arguments."""
    random.seed(0)
    np.random.seed(0)
    transform, theirs, blank = timms.rand_augment_transform(name, {}), [], Image.new("RGB", (8, 8))
    current = []

    def record(kind, image, *args, **_):
        current.append((kind, *args))
        return image

    for operation in transform.ops:
        kind = operation.name.removesuffix("Increasing")
        operation.aug_fn = partial(record, kind)
    for _ in range(COUNT):
        current.clear()
        transform(blank)
        theirs.append([*current])
    ours = drawn(name)
    same_counts(map(len, ours), map(len, theirs))
    ours, theirs = [*chain(*ours)], [*chain(*theirs)]
    same_counts((step[0] for step in ours), (step[0] for step in theirs))
    for kind in ("Rotate", "Color", "Posterize", "Solarize", "SolarizeAdd", "TranslateYRel"):
        one, other = ([step[1] for step in steps if step[0] == kind] for steps in (ours, theirs))
        assert stats.ks_2samp(one, other).pvalue > 1e-4, kind


def same_counts(ours, theirs):
    one, other = Counter(ours), Counter(theirs)
    assert one.keys() == other.keys()
    table = [[counts[key] for key in one] for counts in (one, other)]
    assert stats.chi2_contingency(table).pvalue > 1e-4


@pytest.mark.parametrize("level", [0, 13, 30])
@pytest.mark.parametrize("negative", [False, True])
def test_each_operation_of_trivialaugment_is_torchvisions(image, level, negative):
    policy, ours = policy_of("ta_wide"), AutoAugment("ta_wide", MEAN, "bilinear")
    space = torchvisions.TrivialAugmentWide()._augmentation_space(31)
    seen = {step[0] for steps in drawn("ta_wide", 1000) for step in steps}
    assert seen == space.keys()
    bilinear = torchvisions.InterpolationMode.BILINEAR
    for name, (magnitudes, signed) in space.items():
        value = float(magnitudes[level]) if magnitudes.ndim > 0 else 0.0
        value *= -1 if signed and negative else 1
        theirs = torchvisions.autoaugment._apply_op(image, name, value, bilinear, None)
        mirrored = negative != name.startswith("Translate")  # torchvision shifts the other way
        found = ours.apply(image, name, policy.argument(name, level, mirrored))
        away = np.abs(np.asarray(theirs).astype(int) - np.asarray(found))
        # Its levels are FP32, and a shear becomes an angle: some pixels are rounded otherwise.
        assert away.max() <= 1, name
        assert away.mean() < 0.01, name


def test_trivialaugments_operations_and_levels_are_uniform():
    steps = [*chain(*drawn("ta_wide"))]
    assert len(steps) == COUNT
    assert stats.chisquare([*Counter(name for name, _ in steps).values()]).pvalue > 1e-4
    turns = [argument for name, argument in steps if name == "Rotate"]
    assert {round(abs(turn) / 4.5) for turn in turns} == set(range(31))
    assert stats.kstest(turns, stats.uniform(-137, 274).cdf).pvalue > 1e-4


def test_the_operations_of_3_augment_are_those_of_deit(image):
    """A grey, solarized or blurred image, then torchvision's ColorJitter(0.3, 0.3, 0.3)."""
    ours, functional = AutoAugment("3_augment", MEAN, "bicubic"), torchvisions.functional
    for name, argument, wanted in (
        ("Grey", 0, torchvisions.Grayscale(3)(image)),
        ("Solarize", 128, ImageOps.solarize(image)),
        ("Blur", 1.3, image.filter(ImageFilter.GaussianBlur(1.3))),
        ("Brightness", 0.8, functional.adjust_brightness(image, 0.8)),
        ("Contrast", 1.2, functional.adjust_contrast(image, 1.2)),
        ("Color", 0.7, functional.adjust_saturation(image, 0.7)),
    ):
        assert np.array_equal(ours.apply(image, name, argument), wanted), name
    steps = drawn("3_augment")
    assert stats.chisquare([*Counter(first[0] for first, *_ in steps).values()]).pvalue > 1e-4
    radii = [first[1] for first, *_ in steps if first[0] == "Blur"]
    assert stats.kstest(radii, stats.uniform(0.1, 1.9).cdf).pvalue > 1e-4
    orders = Counter(tuple(name for name, _ in jitter) for _, *jitter in steps)
    assert len(orders) == 6
    assert stats.chisquare([*orders.values()]).pvalue > 1e-4
    for kind in ("Brightness", "Contrast", "Color"):
        factors = [argument for _, *jitter in steps for name, argument in jitter if name == kind]
        assert stats.kstest(factors, stats.uniform(0.7, 0.6).cdf).pvalue > 1e-4


@pytest.mark.parametrize("name", ["rand-m7-mstd0.5-inc1", "ta_wide", "3_augment"])
@pytest.mark.parametrize("backend", ["nvimgcodec", "torchvision"])
def test_images_are_the_same_for_any_threads_ranks_and_position(photos, name, backend):
    transform = replace(SMALL, auto_augment=name, erasing=0.5)
    options = {"backend": backend, "micro_batch_size": 6, "repeats": 3}
    alone = take(loader(photos, transform, **options))
    assert_same(take(loader(photos, transform, threads=4, **options)), alone)
    ranks = [loader(photos, transform, rank=r, world_size=2, **options) for r in range(2)]
    blocks = [block for both in zip(*ranks, strict=True) for block in both]
    assert_same(take(blocks), alone)
    first = loader(photos, transform, **options)
    take(first, 3)
    resumed = loader(photos, transform, **options)
    resumed.load_state_dict(first.state_dict())
    assert_same(take(resumed), tuple(part[18:] for part in alone))
    message = "saved with repeats 3, now it is 1: the order of images would not be the same"
    other = loader(photos, transform, **options | {"repeats": 1})
    refused(message, other.load_state_dict, first.state_dict(), reshard=True)


def test_augmentation_leaves_crops_as_they_are_and_evaluation_alone(photos):
    plain = replace(SMALL, **LEVELS)
    augmented = replace(plain, auto_augment="rand-m7-mstd0.5-inc1")
    options = {"backend": "torchvision", "epochs": 8}
    before, after = (take(loader(photos, t, **options))[0] for t in (plain, augmented))
    same = [torch.equal(*pair) for pair in zip(before, after, strict=True)]
    untouched = np.mean([not steps for steps in drawn("rand-m7-mstd0.5-inc1")])
    assert np.mean(same) == pytest.approx(untouched, abs=0.1)
    options = {"backend": "torchvision", "training": False}
    for transform in (augmented, replace(plain, erasing=1.0)):
        assert_same(
            take(loader(photos, transform, **options)), take(loader(photos, plain, **options))
        )


def test_dali_is_not_used_for_what_its_operators_do_not_give(photos):
    transform = replace(SMALL, auto_augment="ta_wide")
    assert loader(photos, transform).backend == "nvimgcodec"
    message = "^data.auto_augment: backend dali-cpu does not have ta_wide; valid: data.backend="
    refused(message, loader, photos, transform, backend="dali-cpu")
    assert loader(photos, transform, training=False, backend="dali-cpu").backend == "dali-cpu"


@pytest.mark.parametrize(
    "name",
    ["rand-m7.5", "rand-n0", "rand-n7", "rand-p1.5", "rand-inc2", "rand-tweights", "m7", "", "ta"],
)
def test_other_augmentations_are_refused(name):
    with pytest.raises(ValueError, match=r"is no augmentation; valid: ta_wide, .*, or rand with m"):
        Transform(auto_augment=name)


def test_erased_rectangles_are_distributed_as_timms():
    size = 96
    numbers = uniforms(SEED, 0, 0, COUNT, further=True)[:, NUMBERS:]
    ours = rectangles(numbers, 0.25, size)
    erased = ours[:, 2] > 0
    assert erased.mean() == pytest.approx(0.25, abs=0.02)
    left, top, width, height = ours[erased].astype(float).T
    assert min(left.min(), top.min()) >= 0
    assert max((left + width).max(), (top + height).max()) <= size
    random.seed(0)
    erase, theirs = RandomErasing(1.0, device="cpu"), []
    for _ in range(2000):
        rows, columns = torch.where(erase(torch.ones(1, size, size))[0] == 0)
        low, high = torch.stack([columns, rows]).aminmax(dim=1)
        theirs.append([*low, *(high - low + 1)])
    x, y, w, h = np.array(theirs, float).T
    pairs = [(left, x), (top, y), (width * height, w * h), (width / height, w / h)]
    assert all(stats.ks_2samp(*pair).pvalue > 1e-4 for pair in pairs)


@pytest.mark.parametrize("backend", ["dali-cpu", "nvimgcodec", "torchvision"])
def test_erasing_fills_the_same_part_on_every_backend(photos, backend):
    options = {"backend": backend, "batch_size": 53, "epochs": 3}
    plain = take(loader(photos, **options))[0]
    erased = take(loader(photos, replace(SMALL, erasing=0.5), **options))[0]
    numbers = np.concatenate([uniforms(0, epoch, 0, 53, further=True) for epoch in range(3)])
    for i, (x, y, w, h) in enumerate(rectangles(numbers[:, NUMBERS:], 0.5, 24).tolist()):
        plain[i, :, y : y + h, x : x + w] = 0
    assert torch.equal(erased, plain)
