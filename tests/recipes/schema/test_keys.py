"""Keys of a recipe have their effects; those of the sections below it are tested beside them."""

import json

import pytest
import torch
import torch.nn.functional as F

from largebatch.comm import Plan, Topology
from largebatch.lars import LARS
from largebatch.pipeline import Transform
from largebatch.recipes.schema.load import load
from largebatch.recipes.training import build
from largebatch.recipes.training.data import build_sources, transform_of
from largebatch.recipes.training.folder.metrics import read_metrics
from tests.pipeline.formats import Image, example, write_records
from tests.recipes.runs import NO_BATCH_NORM, make


def options(name):
    return lambda trainer: {group[name] for group in trainer.optimizer.param_groups}


def share(option):
    """Number of parameters with the option."""
    return lambda trainer: sum(
        len(group["params"]) for group in trainer.optimizer.param_groups if group[option]
    )


def images(trainer):
    return next(iter(trainer.loader)).images


def evaluated(trainer):
    return next(iter(trainer.val_loader)).images


def backends(trainer):
    return {trainer.loader.backend, trainer.val_loader.backend}


def steps(trainer):
    return trainer.timeline.total_steps


# Other keys -> key -> two values, what to observe of a run before it starts, and what to find. Runs
# with the same other keys have the first value of each, or the second.
EFFECTS = {
    ("schedule.warmup=0",): {
        "model.args": ("{}", "{drop_rate: 0.5}", lambda t: t.model.drop_rate, (0.0, 0.5)),
        "data.threads": (1, 3, lambda t: t.loader.threads, (1, 3)),
        "data.prefetch": (1, 3, lambda t: t.loader.prefetch, (1, 3)),
        "data.backend": ("torchvision", "nvimgcodec", backends, ({"torchvision"}, {"nvimgcodec"})),
        "data.image_size": (32, 24, lambda t: images(t).shape[-1], (32, 24)),
        "data.eval_size": (32, 24, lambda t: evaluated(t).shape[-1], (32, 24)),
        "batch_size": (16, 8, lambda t: t.loader.accumulation, (4, 2)),
        "epochs": (1, 3, steps, (3, 20)),
        "optimizer.lr": (1, 3, lambda t: t._built.schedule(0), (1, 3)),
        "optimizer.momentum": (0.9, 0.5, options("momentum"), ({0.9}, {0.5})),
        "optimizer.weight_decay": (0.1, 0.2, options("weight_decay"), ({0.1, 0}, {0.2})),
        "optimizer.trust_coefficient": (1, 2, options("trust_coefficient"), ({1}, {2})),
        "optimizer.dialect": ("torch", "larc", options("dialect"), ({"torch"}, {"larc"})),
        # test_resnet has 15 convolutions and a classifier, of 47 parameters
        "optimizer.decay_bias_and_norm": ("false", "true", share("weight_decay"), (16, 47)),
        "optimizer.adapt_bias_and_norm": ("false", "true", share("adapt"), (16, 47)),
    },
    ("data.crop_area=[1,1]", "data.flip=0"): {
        "data.repeats": (1, 8, lambda t: len(torch.unique(images(t), dim=0)), (4, 1)),
    },
    ("data.source=synthetic",): {
        "data.train_images": (40, 48, lambda t: len(t.loader.source), (40, 48)),
        "data.val_images": (8, 9, lambda t: len(t.val_loader.source), (8, 9)),
        "data.classes": (6, 7, lambda t: t.model.num_classes, (6, 7)),
        "optimizer.name": ("lars", "sgd", lambda t: type(t.optimizer), (LARS, torch.optim.SGD)),
    },
    ("optimizer.name=AdamW", "schedule.warmup=0"): {
        "optimizer.args": ("{}", "{eps: 0.001}", options("eps"), ({1e-8}, {1e-3})),
        "optimizer.bias_lr_scale": (1, 0.024, options("lr"), ({1}, {1, 0.024})),
    },
    ("optimizer.name=sgd", "schedule.name=step", "schedule.end=0", "schedule.milestones=[4]"): {
        "optimizer.nesterov": ("false", "true", options("nesterov"), ({False}, {True})),
    },
    ("schedule.warmup=0", "schedule.end=0", "epochs=1.2"): {
        "optimizer.body_lr_scale": (1, 0.1, options("lr"), ({1}, {1, 0.1})),
        "schedule.power": (1, 2, lambda t: t._built.schedule(2), (0.5, 0.25)),
    },
}
#: What becomes of an image, which is tested in tests/pipeline.
TRANSFORM = {
    **{"image_size": 40, "eval_size": 48, "eval_resize": 64, "flip": "alternating"},
    **{"crop_area": (0.2, 0.4), "crop_aspect": (0.5, 3.0), "translate": 2, "erasing": 0.5},
    **{"auto_augment": "ta_wide", "train_interpolation": "bicubic"},
    **{"eval_interpolation": "bilinear", "mean": (0.1, 0.2, 0.3), "std": (0.5, 1.0, 2.0)},
}


@pytest.mark.slow("builds runs")
@pytest.mark.parametrize("others", EFFECTS, ids=" ".join)
def test_keys_have_their_effects(photos, tmp_path, others):
    for i in (0, 1):
        keys = [f"{key}={effect[i]}" for key, effect in EFFECTS[others].items()]
        trainer = make(photos, tmp_path / "run", *others, *keys)
        for key, (_, _, observe, expected) in EFFECTS[others].items():
            assert observe(trainer) == expected[i], key


def test_images_are_changed_as_the_keys_say():
    written = [f"data.{key}={json.dumps(value)}" for key, value in TRANSFORM.items()]
    recipe = load("digits", written).recipe
    common = ("crop_area", "crop_aspect", "flip", "eval_resize", "mean", "std")
    train = {key: TRANSFORM[key] for key in (*common, "image_size", "translate", "auto_augment")}
    train |= {"erasing": 0.5, "interpolation": "bicubic"}
    val = {key: TRANSFORM[key] for key in common} | {"image_size": 48, "interpolation": "bilinear"}
    assert transform_of(recipe, training=True) == Transform(**train)
    assert transform_of(recipe, training=False) == Transform(**val)


def test_labels_of_shards_without_an_index_count_from_the_offset(tmp_path):
    names = ("ant", "bee", "cat")
    for split in ("train", "validation"):
        shots = [Image(f"{name}/{split}.jpg", b"abc", i) for i, name in enumerate(names)]
        records = [example(image, names, label_offset=1) for image in shots]
        write_records(tmp_path / f"{split}-00000-of-00001", records)
    keys = [
        *("data.source=tfrecord", f"data.path={tmp_path}", "data.label_offset=1"),
        *("data.train_shards=train-*", "data.val_shards=validation-*"),
    ]
    for source in build_sources(load("digits", keys).recipe):
        assert source.classes == names
        assert source.labels.tolist() == [0, 1, 2]


def test_the_seed_determines_the_weights_and_the_order(photos, tmp_path):
    one, again, other = (make(photos, tmp_path / "run", f"seed={seed}") for seed in (1, 1, 2))
    assert torch.equal(one.model.fc.weight, again.model.fc.weight)
    assert torch.equal(images(one), images(again))
    assert not torch.equal(one.model.fc.weight, other.model.fc.weight)
    assert not torch.equal(images(one), images(other))


def test_label_smoothing_applies_to_the_training_loss_only(photos, tmp_path):
    keys = [*NO_BATCH_NORM, "optimizer.lr=0", "schedule.end=0", "evaluate_every=1", "stop_after=1"]
    trainer = make(photos, tmp_path / "run", *keys, "label_smoothing=0.3", "data.flip=0")
    batches = iter(make(photos, tmp_path / "other", *keys, "data.flip=0").loader)
    trainer.run()
    train_line, val_line = read_metrics(tmp_path / "run")[-2:]

    def loss(batches, smoothing):
        trainer.model.eval()
        with torch.no_grad():
            given = [(trainer.model(x), y) for x, y in batches]
        logits, labels = (torch.cat(tensors) for tensors in zip(*given, strict=True))
        return F.cross_entropy(logits, labels, label_smoothing=smoothing).item()

    first = [next(batches) for _ in range(4)]
    assert train_line["loss"] == pytest.approx(loss(first, 0.3), rel=1e-4)
    assert train_line["loss"] != pytest.approx(loss(first, 0), rel=1e-3)
    assert val_line["loss"] == pytest.approx(loss(trainer.val_loader, 0), rel=1e-4)


def test_the_plan_comes_from_the_algorithm_or_the_file(photos, tmp_path):
    def algorithms(*keys):
        plan = build.build_plan(load("digits", [*keys]).recipe, Topology.of(4, 2))
        return [rule.algorithm for rule in plan.rules]

    assert algorithms("comm.algorithm=null") == ["ring"]
    assert algorithms("comm.algorithm=leader") == ["leader"]
    assert algorithms("comm.algorithm=auto") == ["hierarchical"]
    Plan.single("torus").save(tmp_path / "plan.json")
    for algorithm in ("null", "auto"):
        keys = [f"comm.algorithm={algorithm}", f"comm.plan={tmp_path}/plan.json"]
        assert algorithms(*keys) == ["torus"]
