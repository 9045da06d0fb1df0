"""Loaders of small images on the CPU, and what they deliver."""

from itertools import islice

import torch

from largebatch.pipeline import ImageFolder, Loader, Transform

SMALL = Transform(image_size=24, eval_resize=28)
#: With these, normalisation gives levels of 0 to 255.
LEVELS = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255,) * 3}
BACKENDS = ["nvimgcodec", "dali-cpu", "torchvision"]


def loader(root, transform=SMALL, **options):
    """A loader of the images of ``root/train``, or ``root/val`` in evaluation."""
    split = "train" if options.get("training", True) else "val"
    options = {"batch_size": 12, "epochs": 2, "threads": 1} | options
    return Loader(ImageFolder(root, split), transform, **options)


def take(source, count=None):
    """Return the first batches of a loader: images and labels, each concatenated."""
    batches = [*islice(source, count)]
    return torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])


def assert_same(ours, theirs):
    """Check that two tuples of tensors are equal bit by bit."""
    assert all(map(torch.equal, ours, theirs))
