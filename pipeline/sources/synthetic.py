"""Random images, for training without input."""

from __future__ import annotations


class Synthetic:
    """Random images with random labels, created on the device, for training without input.

    Args:
        images: Nominal number of images in an epoch, at least 1.
        classes: Number of classes.
    """

    kind = "synthetic"

    def __init__(self, images: int, classes: int) -> None:
        self._images = images
        self.classes = tuple(f"{i:0{len(str(classes - 1))}d}" for i in range(classes))

    def __len__(self) -> int:
        return self._images

    @property
    def fingerprint(self) -> str:
        """The numbers of images and classes."""
        return f"synthetic-{self._images}-{len(self.classes)}"
