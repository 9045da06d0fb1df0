"""Recipes in use elsewhere have their published values; the head of each names its source."""

import pytest

from largebatch.recipes.schema.load import load
from tests.recipes.schema.test_configs import lengths

#: Procedure -> epochs, updates, top-1; rate, weight decay, pixels, mixup, smoothing, threshold,
#: drop path, RandAugment's level, repeats.
STRIKES_BACK = {
    "a1": (600, 375_000, 80.4, 5e-3, 0.01, 224, 0.2, 0.1, None, 0.05, 7, 3),
    "a2": (300, 187_500, 79.8, 5e-3, 0.02, 224, 0.1, 0.0, 0.2, 0.05, 7, 3),
    "a3": (100, 62_500, 78.1, 8e-3, 0.02, 160, 0.1, 0.0, 0.2, 0.0, 6, 1),
}


@pytest.mark.parametrize("name", STRIKES_BACK)
def test_resnet_strikes_back_has_the_published_values(name):
    """Wightman et al. 2021, as mmpretrain and PaddleClas have it; the threshold is timm's."""
    loaded = load(f"resnet50-{name}-b2048")
    recipe = loaded.recipe
    options, schedule, mixing, loss = recipe.optimizer, recipe.schedule, recipe.mixing, recipe.loss
    _, total, found = lengths(recipe)
    epochs, updates, top1, *values, level, repeats = STRIKES_BACK[name]
    assert f"Expected: {top1} % top-1 after {epochs} epochs" in loaded.head
    assert (recipe.data.auto_augment, recipe.data.repeats, recipe.data.erasing) == (
        *(f"rand-m{level}-mstd0.5-inc1", repeats, 0),
    )
    assert recipe.data.train_interpolation == "bicubic"
    assert (recipe.epochs, total) == (epochs, pytest.approx(updates, rel=1e-3))
    assert [
        *(options.lr, options.weight_decay, recipe.data.image_size, mixing.mixup),
        *(recipe.label_smoothing, loss.threshold, recipe.model.args.get("drop_path_rate", 0.0)),
    ] == values
    assert (options.name, options.args, options.decay_bias_and_norm) == ("lamb", {}, False)
    assert (mixing.cutmix, mixing.group) == (1, 32)
    assert (loss.name, loss.sum_classes) == ("binary-cross-entropy", False)
    assert (schedule.name, str(schedule.warmup), schedule.end) == ("cosine", "5ep", 1e-6)
    assert found.warmup_steps + found.decay_steps == total
    assert (recipe.eval_size, recipe.data.eval_resize) == (224, 236)
    assert (recipe.data.eval_interpolation, recipe.ema.decay) == ("bicubic", None)


#: Batch, epochs, images of a GPU; rate, momentum, weight decay, epochs of warm-up; top-1.
NVIDIA = (2.048, 0.875, 1 / 32768, 8)
FFCV = (1.7, 0.9, 1e-4, 2)
PUBLISHED = {
    "resnet50-tv2-b1024": (1024, 600, 128, 0.5, 0.9, 2e-5, 5, "80.86"),
    "resnet50-ffcv-b4096": (4096, 16, 512, *FFCV, "73.8"),
    "resnet50-ffcv-32ep-b4096": (4096, 32, 512, *FFCV, "76.6"),
    "resnet50-ffcv-88ep-b4096": (4096, 88, 512, *FFCV, "78.4"),
    "resnet50-nvidia-50ep-b2048": (2048, 50, 256, *NVIDIA, "75.81"),
    "resnet50-nvidia-b2048": (2048, 90, 256, *NVIDIA, "77.12"),
    "resnet50-nvidia-250ep-b2048": (2048, 250, 256, *NVIDIA, "78.43"),
    "resnet50-nus-b8192": (8192, 90, 128, 16, 0.9, 1e-4, 2.5, "77.14"),
    "resnet50-nus-b16384": (16384, 90, 128, 22.627417, 0.9, 1e-4, 5, "about 77"),
    "resnet50-composer-b2048": (2048, 28.8, 256, 2.048, 0.875, 5e-4 / 2.048, 8, "76.19"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_of_others_have_the_published_values(name):
    loaded = load(name)
    recipe, options, schedule = loaded.recipe, loaded.recipe.optimizer, loaded.recipe.schedule
    sizes = recipe.batch_size, recipe.epochs, recipe.micro_batch_size
    momentum = options.args.get("momentum", options.momentum)
    found = options.lr, momentum, options.weight_decay, schedule.warmup.value
    *values, top1 = PUBLISHED[name]
    assert (*sizes, *found) == (*values,)
    assert (schedule.warmup.unit, schedule.end, options.nesterov) == ("ep", 0, False)
    assert f"Expected: {top1} % top-1 after {recipe.epochs:g} epochs" in loaded.head
    assert recipe.model.args["zero_init_last"] is False
    data, source = recipe.data, name.split("-")[1]
    sides = data.image_size, recipe.eval_size, data.eval_resize
    start = schedule.start / options.lr
    assert recipe.label_smoothing == (0.08 if source == "composer" else 0.1)
    assert schedule.name == ("polynomial" if source in ("ffcv", "nus") else "cosine")
    mixing, loss = recipe.mixing, recipe.loss
    mixed = {"resnet50-nvidia-250ep-b2048": (0.2, 0), "resnet50-tv2-b1024": (0.2, 1)}
    assert (mixing.mixup, mixing.cutmix) == mixed.get(name, (0, 0))
    assert loss.threshold is None
    assert loss.sum_classes == (loss.name == "binary-cross-entropy") == (source == "composer")
    if source != "tv2":
        assert (data.auto_augment, data.erasing, data.repeats) == (None, 0, 1)
    if source == "tv2":
        assert (sides, start) == ((176, 224, 232), 0.01)
        assert (data.auto_augment, data.erasing) == ("ta_wide", 0.1)
        assert (data.repeats, data.train_interpolation) == (4, "bilinear")
        # torchvision's references/classification: every 32 steps, adjusted to the epochs
        adjusted = 1 - (1 - 0.99998) * 1024 * 32 / 600
        assert recipe.ema.decay**32 == pytest.approx(adjusted, abs=1e-6)
    elif source == "ffcv":
        assert (sides, schedule.power, start) == ((160, 256, 293), 1, pytest.approx(1e-4))
        epoch = {16: 12, 32: 25, 88: 71}[recipe.epochs]
        assert [(str(s.from_), s.image_size) for s in recipe.stages] == [(f"{epoch}ep", 192)]
        assert data.eval_resize * 7 / 8 == pytest.approx(256, abs=0.5)
    elif source == "nus":
        assert (sides, schedule.power, start) == ((224, 224, 256), 2, 0)
        assert options.lr == pytest.approx(4 * (recipe.batch_size / 512) ** 0.5)
        assert (options.name, options.dialect, options.args) == ("lars", "torch", {"eps": 1e-5})
        assert (options.trust_coefficient, options.adapt_bias_and_norm) == (1e-3, False)
    elif source == "nvidia":
        assert (sides, start) == ((224, 224, 256), 0)
        assert (recipe.precision, recipe.loss_scale) == ("fp16", 128)
    else:
        assert (sides, start) == ((88, 224, 232), 0)
        assert options.decay_bias_and_norm
        assert recipe.ema.decay**100 == pytest.approx(0.5, abs=1e-4)
        assert recipe.model.args["max_pool"]
        # Half the size until 0.4 of the run, then growing to all of it at 0.8, in steps of 4 px.
        for share in (0.3, *(0.4 + step / 1000 for step in range(0, 400, 7)), 0.9):
            begun = [s.image_size for s in recipe.stages if s.from_.value <= share]
            whole = 176 * (0.5 + 0.5 * min(max((share - 0.4) / 0.4, 0), 1))
            assert abs([88, *begun][-1] - whole) < 2.02


def test_the_plain_vision_transformer_has_the_published_values():
    """Beyer et al. 2022, as big_vision's vit_s16_i1k.py has it; AdamW's decay is times the rate."""
    loaded = load("vit-s16-plain-b1024")
    recipe, options, schedule = loaded.recipe, loaded.recipe.optimizer, loaded.recipe.schedule
    assert (recipe.batch_size, recipe.epochs, recipe.label_smoothing) == (1024, 90, 0)
    assert (options.name, options.lr, options.clip_grad_norm) == ("adamw", 1e-3, 1)
    assert options.weight_decay * options.lr == pytest.approx(1e-4)
    assert (schedule.name, str(schedule.warmup), schedule.end) == ("cosine", "10000", 0)
    assert lengths(recipe)[2].warmup_steps / lengths(recipe)[0] == pytest.approx(8.0, abs=0.02)
    assert (recipe.mixing.mixup, recipe.mixing.cutmix, recipe.loss.name) == (
        0.2,
        0,
        "cross-entropy",
    )
    data = recipe.data
    assert (data.auto_augment, data.mean, data.std) == ("rand-m10-n2-p1", (0.5,) * 3, (0.5,) * 3)
    assert (data.image_size, recipe.eval_size, data.eval_resize) == (224, 224, 256)
    assert recipe.model.args == {"class_token": False, "global_pool": "avg"}
    assert "Expected: 76.5 % top-1 after 90 epochs" in loaded.head


def test_deit_iii_has_the_published_values():
    """Touvron et al. 2022, as facebookresearch/deit has it."""
    loaded = load("vit-s16-deit3-b2048")
    recipe, options, schedule = loaded.recipe, loaded.recipe.optimizer, loaded.recipe.schedule
    data, mixing, loss = recipe.data, recipe.mixing, recipe.loss
    assert (recipe.batch_size, recipe.micro_batch_size, recipe.epochs) == (2048, 256, 800)
    assert (options.name, options.lr, options.weight_decay) == ("lamb", 4e-3, 0.05)
    assert (options.args, recipe.model.args) == ({"eps": 1e-8}, {"drop_path_rate": 0.05})
    assert (schedule.name, str(schedule.warmup)) == ("cosine", "5ep")
    assert (schedule.start, schedule.end) == (1e-6, 1e-5)
    assert (loss.name, loss.threshold, loss.sum_classes) == ("binary-cross-entropy", 0, False)
    assert (mixing.mixup, mixing.cutmix) == (0.8, 1)
    assert (recipe.label_smoothing, recipe.ema.decay, data.erasing) == (0, None, 0)
    assert (data.auto_augment, data.repeats) == ("3_augment", 3)
    assert (data.image_size, recipe.eval_size, data.eval_resize) == (224, 224, 224)
    assert data.train_interpolation == data.eval_interpolation == "bicubic"
    assert "Expected: 81.4 % top-1 after 800 epochs" in loaded.head
