"""Random images: training without input."""

from __future__ import annotations


class Synthetic:
    """Random images with random labels, already on the device: training without input.

    Args:
        images: how many there are taken to be, at least 1.
        classes: how many classes.
    """

    kind = "synthetic"

    def __init__(self, images: int, classes: int) -> None:
        self._images = images
        self.classes = tuple(f"{i:0{len(str(classes - 1))}d}" for i in range(classes))

    def __len__(self) -> int:
        return self._images

    @property
    def fingerprint(self) -> str:
        """Its numbers of images and classes."""
        return f"synthetic-{self._images}-{len(self.classes)}"
