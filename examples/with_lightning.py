"""LARS in a LightningModule, with Lightning's own trainer and its checkpoints after each epoch.

Trains a small ResNet on 1,438 of scikit-learn's digits in batches of 128, with
more than 95 % accuracy on the other 359 in well under a minute on 2 CPU cores:

    python examples/with_lightning.py
    python examples/with_lightning.py "checkpoints/epoch=7-step=88.ckpt"  # continues from there
"""

import sys

import lightning
import timm
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, TensorDataset, random_split

from largebatch.lars import LARS, as_scheduler, polynomial, split_parameters


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = timm.create_model("test_resnet", in_chans=1, num_classes=10)

    def training_step(self, batch, index):
        images, labels = batch
        return cross_entropy(self.model(images), labels)

    def test_step(self, batch, index):
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        optimizer = LARS(split_parameters(self, weight_decay=1e-4), lr=2.0)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = as_scheduler(optimizer, polynomial(2.0, steps, warmup_steps=steps // 5))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main(checkpoint: str | None = None) -> float:
    """Train, from a checkpoint if one is given; return the accuracy on held-out digits."""
    torch.manual_seed(0)
    data = load_digits()  # 8 x 8 pixels in [0, 16]
    images = interpolate(torch.tensor(data.images).float()[:, None] / 8 - 1, scale_factor=2)
    training, held_out = random_split(TensorDataset(images, torch.tensor(data.target)), [0.8, 0.2])
    loader = DataLoader(training, batch_size=128, shuffle=True, drop_last=True)

    trainer = lightning.Trainer(max_epochs=8, logger=False)
    model = Classifier()
    trainer.fit(model, loader, ckpt_path=checkpoint)
    (metrics,) = trainer.test(model, DataLoader(held_out, batch_size=len(held_out)))
    return metrics["accuracy"]


if __name__ == "__main__":
    main(*sys.argv[1:])
