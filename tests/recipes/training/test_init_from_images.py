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


def test_the_first_layer_is_made_from_images_and_not_trained(photos, tmp_path):
    keys = [*AIRBENCH, "optimizer.weight_decay=0.1"]
    before = weights(make(photos, tmp_path / "before", *keys))
    other = weights(make(photos, tmp_path / "other", *keys, "seed=1"))
    assert before["whiten.weight"].any()
    torch.testing.assert_close(other["whiten.weight"], before["whiten.weight"])
    after = train(photos, tmp_path / "run", *keys, "stop_after=3")  # test_resume.py resumes it
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed >= {"whiten.bias", "fc.weight"}
    assert "whiten.weight" not in changed


def test_images_held_out_are_not_taken_and_several_batches_are_one_tensor(
    photos, tmp_path, monkeypatch
):
    seen = []
    monkeypatch.setattr(initial_weights, "_BATCH", 7)
    monkeypatch.setattr(Airbench, "init_from_images", lambda model, images: seen.append(images))
    trainer = make(photos, tmp_path / "run", *AIRBENCH, "init.images=30", "data.holdout=20")
    assert [images.shape for images in seen] == [(30, 3, 32, 32)]
    held = torch.cat([images for images, _ in trainer.val_loader])
    transform = trainer.val_loader.transform
    as_evaluated = Loader(trainer.loader.source, transform, batch_size=8, training=False)
    kept = torch.cat([images for images, _ in as_evaluated])

    def found(image, among):
        return bool((among == image).flatten(1).all(1).any())

    assert len(held) == 20
    assert len(kept) == 33
    assert all(found(image, kept) and not found(image, held) for image in seen[0])
