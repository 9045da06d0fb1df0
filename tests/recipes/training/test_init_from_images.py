"""Weights that a model computes from training images before the first step."""

import pytest
import torch

from largebatch.pipeline import DataError, Loader
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.models.airbench import Airbench
from largebatch.recipes.training import initial_weights
from tests.ranks import run_ranks
from tests.recipes.runs import make, train, weights

AIRBENCH = [
    "model.name=airbench",
    "model.args.widths=[4,4,4]",
    "model.zero_init_last_norm=false",
    "init.images=40",
]


def test_the_first_layer_whitens_training_images(photos, tmp_path):
    trainer = make(photos, tmp_path / "run", *AIRBENCH, "epochs=100", "data.flip=0")
    images = torch.cat([next(iter(trainer.loader)).images for _ in range(30)])
    outputs = trainer.model.whiten(images).double().transpose(0, 1).flatten(1)[:12]
    moments = outputs @ outputs.T / outputs.shape[1]
    # Other crops of about the same images: nearly of unit variance, and uncorrelated.
    assert moments.diag().min() > 0.2
    assert moments.diag().max() < 3
    scale = moments.diag().sqrt()
    correlations = moments / scale / scale[:, None] - torch.eye(12)
    assert correlations.abs().max() < 0.6
    assert correlations.abs().mean() < 0.15
    untouched = make(photos, tmp_path / "other", *AIRBENCH, "seed=1")
    torch.testing.assert_close(untouched.model.whiten.weight, trainer.model.whiten.weight)


def test_images_held_out_are_not_taken_and_several_batches_are_one_tensor(
    photos, tmp_path, monkeypatch
):
    seen = []
    monkeypatch.setattr(initial_weights, "_BATCH", 7)
    monkeypatch.setattr(Airbench, "init_from_images", lambda model, images: seen.append(images))
    trainer = make(photos, tmp_path / "run", *AIRBENCH, "init.images=30", "data.holdout=20")
    assert [images.shape for images in seen] == [(30, 3, 32, 32)]
    held = torch.cat([images for images, _ in trainer.val_loader])
    kept = torch.cat([images for images, _ in evaluated(trainer.loader.source, trainer)])

    def found(image, among):
        return bool((among == image).flatten(1).all(1).any())

    assert len(held) == 20
    assert len(kept) == 33
    assert all(found(image, kept) and not found(image, held) for image in seen[0])


def evaluated(source, trainer):
    """A loader of images as they are evaluated."""
    loader = trainer.val_loader
    return Loader(source, loader.transform, batch_size=8, training=False, backend=loader.backend)


def test_the_first_layer_is_not_trained(photos, tmp_path):
    keys = [*AIRBENCH, "optimizer.weight_decay=0.1"]
    before = weights(make(photos, tmp_path / "other", *keys))
    first = train(photos, tmp_path / "run", *keys, "stop_after=3")  # test_resume.py resumes it
    assert torch.equal(first["whiten.weight"], before["whiten.weight"])
    assert not torch.equal(first["whiten.bias"], before["whiten.bias"])
    assert not torch.equal(first["fc.weight"], before["fc.weight"])


def start_on_a_rank(photos, tmp_path):
    return weights(make(photos, tmp_path, *AIRBENCH))["whiten.weight"]


@pytest.mark.slow("two ranks, each a process that imports torch")
def test_all_ranks_start_from_the_same_weights(photos, tmp_path):
    one, other = run_ranks(2, start_on_a_rank, photos, tmp_path)
    assert torch.equal(one, other)
    assert one.abs().max() > 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([*AIRBENCH, "init.images=null"], "airbench sets weights from training images; valid: "),
        ([*AIRBENCH, "init.images=53"], "53 of 53 training images; valid: below 53"),
        (["init.images=40"], "test_resnet has no method init_from_images; valid: null, or a model"),
        (["init.images=4", "init.from=x"], "init.from has all weights already; vali"),
    ],
)
def test_a_model_and_its_images_must_fit(photos, tmp_path, keys, message):
    with pytest.raises((RecipeError, DataError)) as error:
        make(photos, tmp_path / "run", *keys)
    assert f"init.images: {message}" in str(error.value)
    assert not (tmp_path / "run").exists()
