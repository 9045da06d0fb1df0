"""Every packaged recipe: its arithmetic, the objects built from it, and the table of recipes."""

import math
from typing import NamedTuple

import pytest
import torch

from largebatch.recipes.ranks import Job
from largebatch.recipes.schema import catalogue
from largebatch.recipes.schema.load import load
from largebatch.recipes.schema.names import recipe_names
from largebatch.recipes.training.timeline import learning_rates, timeline_of
from largebatch.recipes.training.trainer import Trainer

HEAD = ("It has not been trained here.", "Source: ")
IMAGENET = [n for n in recipe_names() if n.startswith(("resnet50-", "alexnet-", "vit-"))]
JOB = Job(0, 1, 1, torch.device("cpu"))


class Point(NamedTuple):
    """A reference convergence point of MLPerf Training, as logged.

    rcps_resnet.json of rcp_checker/training_4.0.0 in mlcommons/logging.
    """

    lr: float
    warmup: int
    momentum: float
    weight_decay: float
    decay_steps: int
    bn_span: int
    epochs: tuple[int, float, int]  # least, mean and most of the runs
    by: str


POINTS = {
    1632: Point(7.4, 2, 0.9, 5e-5, 27476, 204, (33, 35, 37), "NVIDIA"),
    3264: Point(10.5, 2, 0.9, 5e-5, 14523, 204, (34, 35.2, 37), "NVIDIA"),
    4096: Point(10, 5, 0.9, 2e-4, 13137, 64, (39, 40, 42), "Google"),
    8192: Point(17, 5, 0.9, 2e-4, 6095, 64, (41, 42, 44), "Google"),
    13056: Point(12.8, 9, 0.9, 2.5e-5, 4710, 204, (44, 45.4, 46), "NVIDIA"),
    32768: Point(21.2, 16, 0.94, 2.5e-5, 2267, 128, (55, 56, 57), "Google"),
    49152: Point(19.405, 24, 0.951807, 1e-4, 1846, 256, (67, 68, 69), "NVIDIA"),
    58880: Point(23.246, 29, 0.951807, 1e-4, 1785, 230, (78, 79.9, 81), "NVIDIA"),
    65536: Point(24.699, 31, 0.951807, 1e-4, 1133, 128, (83, 84.5, 86), "Google"),
    67840: Point(24.699, 31, 0.951807, 1e-4, 1133, 424, (85, 85.9, 87), "NVIDIA"),
}


def lengths(recipe):
    run = timeline_of(recipe, recipe.data.train_images)
    return run.steps_per_epoch, run.total_steps, learning_rates(recipe, run)


@pytest.mark.parametrize("batch", POINTS)
def test_mlperfs_points_have_the_logged_values_and_lengths(batch):
    point, loaded = POINTS[batch], load(f"resnet50-b{batch}")
    recipe, options = loaded.recipe, loaded.recipe.optimizer
    assert (recipe.batch_size, recipe.micro_batch_size) == (batch, point.bn_span)
    assert (options.name, options.lr, options.momentum) == ("lars", point.lr, point.momentum)
    assert options.weight_decay == point.weight_decay
    assert str(recipe.schedule.warmup) == f"{point.warmup}ep"
    assert options.dialect == ("mlperf-corrected" if point.by == "NVIDIA" else "mlperf")
    # The rules of the closed division.
    schedule = recipe.schedule
    assert (schedule.name, schedule.power, schedule.end) == ("polynomial", 2, 1e-4)
    assert (options.args, recipe.label_smoothing, recipe.target_accuracy) == ({}, 0.1, 75.9)
    assert math.log2(options.weight_decay / 1e-4).is_integer()
    least, mean, last = point.epochs
    words = " ".join(loaded.head.split())
    assert f"75.9 % top-1 after {mean} epochs ({least} to {last})" in words
    assert f"{point.decay_steps:,} decay steps" in words
    # The schedule ends when the logged runs had converged, and not much later. Of the two readings
    # of "decay steps" it is the shorter one that does not cut off a run.
    per_epoch, total, found = lengths(recipe)
    logged = found.decay_steps + (found.warmup_steps if schedule.decay_from == "start" else 0)
    assert abs(logged - point.decay_steps) <= 1
    readings = {
        "start": point.decay_steps / per_epoch,
        "warmup": point.decay_steps / per_epoch + point.warmup,
    }
    long_enough = {reading: end for reading, end in readings.items() if end > last - 0.05}
    assert schedule.decay_from == min(long_enough, key=lambda reading: long_enough[reading])
    end = (found.warmup_steps + found.decay_steps) / per_epoch
    # NVIDIA took the schedule of Google's 65,536 to 67,840, whose runs ended 4 epochs before it.
    assert last - 0.05 < end < last + 4
    # The run ends with the schedule: less than an epoch remains at the end rate.
    assert 0 <= total - (found.warmup_steps + found.decay_steps) < per_epoch
    assert found.schedule(total) == pytest.approx(1e-4)


@pytest.mark.parametrize(("batch", "lr"), [(512, 2), (8192, 14), (16384, 23), (32768, 22)], ids=str)
def test_alexnets_decay_follows_the_lars_authors_at_every_step(batch, lr):
    """nvcaffe's rate after the warm-up, lr (1 - t / T)^2, has t from the start of the run."""
    recipe = load(f"alexnet-bn-b{batch}").recipe
    _, total, found = lengths(recipe)
    assert recipe.schedule.start == found.schedule(0) == 1
    assert found.schedule(found.warmup_steps // 2) == pytest.approx(
        1 + (0.9025 * lr - 1) / 4, rel=2e-2
    )
    after = range(found.warmup_steps, total, max(1, total // 100))
    for step in after:
        assert found.schedule(step) == pytest.approx(lr * (1 - step / total) ** 2, rel=1e-3)


def test_the_schedules_without_lars_are_those_of_their_sources():
    per_epoch, total, goyal = lengths(load("resnet50-sgd-b8192").recipe)
    assert goyal.schedule(0) == 0.1
    at = [round(epochs * per_epoch) for epochs in (2.5, 5, 29.99, 30.01, 60.01, 80.01)]
    assert [goyal.schedule(s) for s in at] == pytest.approx(
        [1.65, 3.2, 3.2, 0.32, 0.032, 0.0032], rel=1e-3
    )
    assert total == round(90 * per_epoch)
    _, _, small = lengths(load("resnet50-sgd-b256").recipe)
    assert (small.warmup_steps, small.schedule(0)) == (0, 0.1)
    _, steps, nado = lengths(load("resnet50-nesterov-b32768").recipe)
    assert steps == nado.warmup_steps + nado.decay_steps == 2512
    per_epoch, total, nvidia = lengths(load("resnet50-sgd-b3264").recipe)
    assert total == nvidia.warmup_steps + nvidia.decay_steps == round(42 * per_epoch)


@pytest.mark.parametrize("name", IMAGENET)
def test_a_recipe_for_imagenet_says_what_it_is_and_its_rate_rises_to_its_peak(name):
    """At 65,536 an epoch is 19.5 updates, seconds on a cluster; MLPerf's rule is 4 epochs."""
    loaded = load(name)
    recipe, peak = loaded.recipe, loaded.recipe.optimizer.lr
    assert recipe.batch_size == int(name.rpartition("-b")[2])
    assert recipe.data.train_images == 1_281_167
    expected = ("4ep", "8ep") if recipe.batch_size >= 8192 else ("1ep", "1ep")
    assert (str(recipe.evaluate_every), str(recipe.checkpoint.every)) == expected
    _, total, found = lengths(recipe)
    rates = [found.schedule(step) for step in (*range(0, total, 97), found.warmup_steps)]
    assert max(rates) == rates[-1] == peak
    assert found.schedule(total) < 3e-3 * peak
    words = " ".join(loaded.head.split())
    assert all(part in words for part in HEAD)
    assert f"recipes.train {name} " in words.replace("\\ ", "")


def test_muons_length_at_65536_is_a_goal_below_a_bound():
    """K-FAC's runs, of 35 epochs at 16,384 to 80 at 131,072, obey E(B) = 31.8 (1 + B / 83,000)."""
    loaded = load("resnet50-muon-b65536")
    recipe, bound = loaded.recipe, load("resnet50-b65536").recipe
    assert recipe.epochs == 60 == pytest.approx(31.8 * (1 + recipe.batch_size / 83_000), rel=0.06)
    assert recipe.epochs < bound.epochs
    assert "never run" in loaded.head.splitlines()[0]
    (entry,) = (e for e in catalogue.entries() if e.name == "resnet50-muon-b65536")
    assert "goal" in entry.reaches


SMALL = [
    *("data.source=synthetic", "data.train_images=64", "data.classes=10", "device=cpu"),
    *("batch_size=4", "micro_batch_size=2", "epochs=1", "mixing.group=2", "stop_after=2"),
    *("schedule.warmup=2", "schedule.decay=null", "schedule.decay_from=warmup"),
]
SMALL_RESNET = [
    *("model.name=test_resnet", "data.image_size=32", "data.eval_size=32", "data.eval_resize=32"),
]
SMALL_ALEXNET = [
    *("model.args.img_size=67", "data.image_size=67", "data.eval_resize=67"),
    "batch_size=2",  # half precision takes more than a second for each micro-batch on a CPU
]
SMALL_VIT = ["model.args.img_size=32", "model.args.depth=1", *SMALL_RESNET[1:]]
STEP = ["schedule.milestones=[3,4]"]


def smaller_model(name):
    """Overrides that make a recipe's model and images small; those of CIFAR-10 are."""
    model = load(name).recipe.model.name
    if model == "alexnet_bn":
        return SMALL_ALEXNET
    if model == "airbench":
        return ["init.images=16"]
    if model.startswith(("vit", "deit")):
        return SMALL_VIT
    if "max_pool" in load(name).recipe.model.args:  # which the small one does not take
        return [*SMALL_RESNET[1:], "stages=[]"]
    return [] if model == "resnet9" else [*SMALL_RESNET, "stages=[]"]


def kinds_of_recipes():
    """One recipe of each kind: they differ in more than rates, lengths and the batch."""
    found = {}
    for name in recipe_names():
        recipe = load(name, asks_timm=False).recipe
        options = recipe.optimizer
        kind = (recipe.model.name, options.name, options.dialect, *options.args, recipe.precision)
        kind += (recipe.schedule.name, recipe.mixing.is_on, recipe.loss.name, recipe.ema.decay)
        found.setdefault(kind, name)
    return [*found.values()]


@pytest.mark.slow("trains a recipe of each kind")
@pytest.mark.parametrize("name", kinds_of_recipes())
def test_a_recipe_takes_two_steps_when_shrunk(name, tmp_path, monkeypatch):
    """With its own optimizer, precision and kind of schedule; ResNet-50 itself in test_trainer."""
    monkeypatch.setattr("largebatch.recipes.models.alexnet._HIDDEN", 64)
    own = load(name).recipe
    small = [*SMALL, *smaller_model(name), *(STEP if own.schedule.name == "step" else [])]
    if own.init.from_:
        small.append("init.from=null")  # weights of a larger model, from a network
    if own.precision.startswith("fp16") and own.loss_scale == "auto":
        small.append("loss_scale=128")  # which skips no step to find its scale
    trainer = Trainer.of(load(name, [*small, f"run_dir={tmp_path}"]), JOB, quiet=True)
    before = {k: v.detach().clone() for k, v in trainer.model.named_parameters()}
    assert own.precision in (trainer.precision.name, "auto")
    assert trainer.loader.accumulation == trainer.context.recipe.batch_size // 2
    assert trainer.run()["step"] == 2
    after = dict(trainer.model.named_parameters())
    assert all(value.isfinite().all() for value in after.values())
    last = [name for name, value in after.items() if value.ndim == 2][-1]
    assert last in ("fc.weight", "classifier.fc8.weight", "head.weight")
    assert not torch.equal(after[last], before[last])


def test_every_recipe_is_described_in_a_few_words():
    entries = catalogue.entries()
    assert sorted(e.name for e in entries) == recipe_names()
    for entry in entries:
        assert 5 < len(entry.what) < 45, entry
        assert "% top-1" in entry.reaches or entry.reaches == "not measured yet", entry
        assert len(entry.reaches) < 60, entry
        assert entry.reaches.count("(") == entry.reaches.count(")"), entry
    sizes = [e.recipe.batch_size for e in entries if e.name.startswith("resnet50-b")]
    assert sizes == list(POINTS)
