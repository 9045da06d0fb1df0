"""Recipes in use elsewhere have their published values; the head of each names its source."""

from functools import reduce
from operator import getitem

import pytest

from largebatch.recipes.schema.load import load, nested
from tests.recipes.schema.test_configs import lengths

#: Keys of all these recipes, and their values where the rows below have no others.
USUAL = (
    "label_smoothing=0.1; model.args={zero_init_last: false}; optimizer.name=sgd;"
    "optimizer.momentum=0.9; optimizer.nesterov=false; optimizer.args={};"
    "optimizer.decay_bias_and_norm=false; data.image_size=224; data.eval_resize=256;"
    "data.auto_augment=null; data.repeats=1; data.erasing=0; data.train_interpolation=bilinear;"
    "mixing.mixup=0; mixing.cutmix=0; loss.name=cross-entropy; loss.threshold=null;"
    "loss.sum_classes=false; schedule.name=cosine; schedule.start=0; schedule.end=0;"
    "ema.decay=null"
)
RSB = (  # Wightman et al. 2021, as mmpretrain and PaddleClas have it; the threshold is timm's
    "optimizer.name=lamb; data.eval_resize=236; data.train_interpolation=bicubic;"
    "data.eval_interpolation=bicubic; mixing.cutmix=1; mixing.group=32; schedule.start=1e-4;"
    "schedule.end=1e-6; loss.name=binary-cross-entropy; loss.threshold=0.2; label_smoothing=0;"
)
A3 = f"{RSB} data.image_size=160; mixing.mixup=0.1; data.auto_augment=rand-m6-mstd0.5-inc1;"
A3 += "model.args={}"
A2 = f"{RSB} mixing.mixup=0.1; data.auto_augment=rand-m7-mstd0.5-inc1; data.repeats=3;"
A2 += "model.args={drop_path_rate: 0.05};"
A1 = f"{A2} mixing.mixup=0.2; label_smoothing=0.1; loss.threshold=null"
TV2 = (
    "data.image_size=176; data.eval_resize=232; data.auto_augment=ta_wide; data.erasing=0.1;"
    "data.repeats=4; mixing.mixup=0.2; mixing.cutmix=1; schedule.start=5e-3; ema.decay=0.99996585"
)
FFCV = (
    "data.image_size=160; data.eval_resize=293; schedule.name=polynomial; schedule.power=1;"
    "schedule.start=1.7e-4"
)
NVIDIA = "optimizer.momentum=0.875; precision=fp16; loss_scale=128;"
MIXED = f"{NVIDIA} mixing.mixup=0.2"
NUS = (
    "optimizer.name=lars; optimizer.dialect=torch; optimizer.args={eps: 1e-5};"
    "optimizer.trust_coefficient=1e-3; optimizer.adapt_bias_and_norm=false;"
    "schedule.name=polynomial; schedule.power=2"
)
COMPOSER = (
    "optimizer.name=timm.optim:SGDW; optimizer.args={momentum: 0.875}; label_smoothing=0.08;"
    "optimizer.decay_bias_and_norm=true; model.args={max_pool: true, zero_init_last: false};"
    "loss.name=binary-cross-entropy; loss.sum_classes=true; data.image_size=88;"
    "data.eval_resize=232; ema.decay=0.993092"
)
PLAIN = (  # Beyer et al. 2022, as big_vision's vit_s16_i1k.py has it
    "optimizer.name=adamw; optimizer.clip_grad_norm=1; label_smoothing=0; mixing.mixup=0.2;"
    "data.auto_augment=rand-m10-n2-p1; data.mean=[0.5, 0.5, 0.5]; data.std=[0.5, 0.5, 0.5];"
    "model.args={class_token: false, global_pool: avg}"
)
DEIT3 = (  # Touvron et al. 2022, as facebookresearch/deit has it
    "optimizer.name=lamb; optimizer.args={eps: 1e-8}; model.args={drop_path_rate: 0.05};"
    "label_smoothing=0; schedule.start=1e-6; schedule.end=1e-5; loss.name=binary-cross-entropy;"
    "loss.threshold=0; mixing.mixup=0.8; mixing.cutmix=1; data.auto_augment=3_augment;"
    "data.repeats=3; data.eval_resize=224; data.train_interpolation=bicubic;"
    "data.eval_interpolation=bicubic"
)
#: Batch, images of a GPU, epochs, learning rate, weight decay, warm-up, pixels in evaluation, and
#: top-1 of each recipe, then its other keys. The weight decay of AdamW is times its rate.
PUBLISHED = {
    "resnet50-a1-b2048": (2048, 256, 600, 5e-3, 0.01, "5ep", 224, "80.4", A1),
    "resnet50-a2-b2048": (2048, 256, 300, 5e-3, 0.02, "5ep", 224, "79.8", A2),
    "resnet50-a3-b2048": (2048, 256, 100, 8e-3, 0.02, "5ep", 224, "78.1", A3),
    "resnet50-tv2-b1024": (1024, 128, 600, 0.5, 2e-5, "5ep", 224, "80.86", TV2),
    "resnet50-ffcv-b4096": (4096, 512, 16, 1.7, 1e-4, "2ep", 256, "73.8", FFCV),
    "resnet50-ffcv-32ep-b4096": (4096, 512, 32, 1.7, 1e-4, "2ep", 256, "76.6", FFCV),
    "resnet50-ffcv-88ep-b4096": (4096, 512, 88, 1.7, 1e-4, "2ep", 256, "78.4", FFCV),
    "resnet50-nvidia-50ep-b2048": (2048, 256, 50, 2.048, 2**-15, "8ep", 224, "75.81", NVIDIA),
    "resnet50-nvidia-b2048": (2048, 256, 90, 2.048, 2**-15, "8ep", 224, "77.12", NVIDIA),
    "resnet50-nvidia-250ep-b2048": (2048, 256, 250, 2.048, 2**-15, "8ep", 224, "78.43", MIXED),
    "resnet50-nus-b8192": (8192, 128, 90, 16, 1e-4, "2.5ep", 224, "77.14", NUS),
    "resnet50-nus-b16384": (16384, 128, 90, 22.627417, 1e-4, "5ep", 224, "about 77", NUS),
    "resnet50-composer-b2048": (2048, 256, 28.8, 2.048, 2**-12, "8ep", 224, "76.19", COMPOSER),
    "vit-s16-plain-b1024": (1024, 128, 90, 1e-3, 0.1, 10000, 224, "76.5", PLAIN),
    "vit-s16-deit3-b2048": (2048, 256, 800, 4e-3, 0.05, "5ep", 224, "81.4", DEIT3),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_of_others_have_the_published_values(name):
    loaded, (*numbers, top1, others) = load(name), PUBLISHED[name]
    recipe = loaded.recipe
    content = recipe.model_dump(mode="json", by_alias=True)
    assert numbers == [
        *(recipe.batch_size, recipe.micro_batch_size, recipe.epochs, recipe.optimizer.lr),
        *(recipe.optimizer.weight_decay, content["schedule"]["warmup"], recipe.eval_size),
    ]
    rows = (row.strip().partition("=") for row in f"{USUAL};{others}".split(";") if row.strip())
    for key, text in {key: text for key, _, text in rows}.items():
        assert reduce(getitem, key.split("."), content) == nested([f"x={text}"])["x"], key
    assert f"Expected: {top1} % top-1 after {recipe.epochs:g} epochs" in loaded.head


def test_images_grow_as_published():
    for name, epoch in (("", 12), ("-32ep", 25), ("-88ep", 71)):
        stages = load(f"resnet50-ffcv{name}-b4096").recipe.stages
        assert [(str(s.from_), s.image_size) for s in stages] == [(f"{epoch}ep", 192)]
    # Half the size until 0.4 of the run, then growing to all of it at 0.8, in steps of 4 px.
    stages = load("resnet50-composer-b2048").recipe.stages
    for share in (0.3, *(0.4 + step / 1000 for step in range(0, 400, 7)), 0.9):
        begun = [s.image_size for s in stages if s.from_.value <= share]
        whole = 176 * (0.5 + 0.5 * min(max((share - 0.4) / 0.4, 0), 1))
        assert abs([88, *begun][-1] - whole) < 2.02


def test_runs_have_as_many_updates_as_published():
    """Of ResNet strikes back; the warm-up of the plain transformer is 8 of 90 epochs."""
    for name, updates in (("a1", 375_000), ("a2", 187_500), ("a3", 62_500)):
        _, total, found = lengths(load(f"resnet50-{name}-b2048").recipe)
        assert total == found.warmup_steps + found.decay_steps == pytest.approx(updates, rel=1e-3)
    per_epoch, _, plain = lengths(load("vit-s16-plain-b1024").recipe)
    assert plain.warmup_steps / per_epoch == pytest.approx(8.0, abs=0.02)
