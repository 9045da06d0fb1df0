"""A small network on random images, for tests that train many runs."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.recipes.runs import make

SYNTHETIC = [
    *("data.source=synthetic", "data.path=null", "data.classes=5", "data.train_images=48"),
    *("data.val_images=8", "data.image_size=12", "data.eval_resize=12"),
    *("batch_size=12", "micro_batch_size=4", "epochs=2", "label_smoothing=0.1"),
    *("evaluate_every=1ep", "log_every=3", "schedule.warmup=1ep"),
]


class Small(nn.Sequential):
    """Layers with running statistics, and with random numbers; ``hidden`` adds a linear layer."""

    def __init__(self, classes: int, hidden: int = 0) -> None:
        more = [nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 6)] if hidden else []
        super().__init__(
            nn.Conv2d(3, 6, 3, stride=2, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            *more,
            nn.Dropout(0.3),
            nn.Linear(6, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Call the layers, in code of our own: torch 2.11 does not compile that of Sequential."""
        return super().forward(images)


@contextmanager
def small_networks(kind=Small, **options):
    """Let recipes build the small network, or another ``kind`` that is made like it."""

    def build(recipe, classes):
        torch.manual_seed(7)
        return kind(classes, **options, **recipe.args)

    with (
        mock.patch("largebatch.recipes.training.build.build_model", build),
        mock.patch("largebatch.recipes.training.build.check_image_size"),
    ):
        yield


@pytest.fixture
def small():
    """Let recipes build the small network."""
    with small_networks():
        yield


def small_trainer(run_dir, *keys):
    """Return a trainer of the small network, whose LARS is of the kind that runs on any device."""
    trainer = make(None, run_dir, *SYNTHETIC, *keys)
    if hasattr(trainer.optimizer, "_implementation"):
        trainer.optimizer._implementation = "foreach"
    return trainer
