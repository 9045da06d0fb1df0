"""LARS and a plan in Lightning's own trainer, with its checkpoints after each epoch.

Trains a small ResNet on 1,438 of scikit-learn's digits in batches of 128, with
more than 95 % accuracy on the other 359 in well under a minute on 2 CPU cores:

    python examples/with_lightning.py --devices 2
    python examples/with_lightning.py "checkpoints/epoch=7-step=88.ckpt"  # continues from there
"""

import argparse

import lightning
import timm
import torch
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, TensorDataset, random_split

from largebatch.comm import Plan, PlanState, plan_hook
from largebatch.lars import LARS, as_scheduler, polynomial, split_parameters

STATE = PlanState(Plan.single("hierarchical"))


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = timm.create_model("test_resnet", in_chans=1, num_classes=10)

    def on_fit_start(self):
        if self.trainer.world_size > 1 and self.device.type == "cpu":
            # The strategy registers its hook on GPUs only.
            self.trainer.strategy.model.register_comm_hook(STATE, plan_hook)

    def training_step(self, batch, index):
        images, labels = batch
        return cross_entropy(self.model(images), labels)

    def test_step(self, batch, index):
        images, labels = batch
        right = self.model(images).argmax(1) == labels
        self.log("accuracy", right.float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = LARS(split_parameters(self, weight_decay=1e-4), lr=2.0)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = as_scheduler(optimizer, polynomial(2.0, steps, warmup_steps=steps // 5))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main(checkpoint: str | None = None, devices: int = 1) -> float:
    """Train, from a checkpoint if one is given; return the accuracy on held-out digits."""
    torch.manual_seed(0)
    data = load_digits()  # 8 x 8 pixels in [0, 16]
    images = interpolate(torch.tensor(data.images).float()[:, None] / 8 - 1, scale_factor=2)
    training, held_out = random_split(TensorDataset(images, torch.tensor(data.target)), [0.8, 0.2])
    loader = DataLoader(training, batch_size=128 // devices, shuffle=True, drop_last=True)

    model, options = Classifier(), STATE.plan.ddp_options()
    hooked = DDPStrategy(ddp_comm_state=STATE, ddp_comm_hook=plan_hook, **options)
    strategy = hooked if devices > 1 else "auto"
    trainer = lightning.Trainer(max_epochs=8, logger=False, devices=devices, strategy=strategy)
    trainer.fit(model, loader, ckpt_path=checkpoint)
    (metrics,) = trainer.test(model, DataLoader(held_out, batch_size=len(held_out)))
    if STATE.topology:
        print(f"nodes {STATE.topology.nodes} by {STATE.topology.source}")
    return metrics["accuracy"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--devices", type=int, default=1)
    main(**vars(parser.parse_args()))
