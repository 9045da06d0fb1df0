"""Small data sets for all tests, and how Triton's kernels run in them."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image

# Where there is no GPU, Triton's kernels run in its interpreter. It must be told before it is
# imported, as timm and torchvision do.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# How long an example takes is a matter of what else the machine does.
settings.register_profile("largebatch", deadline=None)
settings.load_profile("largebatch")


def write_images(folder: Path, counts: dict[str, int], seed: int = 0) -> None:
    """Smooth random JPEG files of assorted sizes, ``counts[class]`` in each class folder."""
    generator = np.random.default_rng(seed)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            coarse = generator.integers(0, 256, (5, 6, 3), dtype=np.uint8)
            size = tuple(int(v) for v in generator.integers(24, 90, 2))
            image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
            image.save(folder / name / f"{i:03d}.JPEG", quality=92)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A data set of 3 classes: 53 images to train on, 23 to evaluate."""
    root = tmp_path_factory.mktemp("photos")
    write_images(root / "train", {"ant": 20, "bee": 16, "cat": 17})
    write_images(root / "val", {"ant": 9, "bee": 1, "cat": 13}, seed=1)
    return root


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """The embedded data set."""
    from largebatch.pipeline import prepare_digits

    root = tmp_path_factory.mktemp("data") / "digits"
    prepare_digits(root)
    return root
