"""Weights that a model computes from training images before the first step."""

import torch

from largebatch.pipeline import Loader
from largebatch.recipes.models.airbench import Airbench
from largebatch.recipes.training import initial_weights
from tests.recipes.runs import make, train, weights

AIRBENCH = [
    "model.name=airbench",
    "model.args.widths=[4,4,4]",
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
