"""CIFAR-10 on the GPU: what is read, and how images are cropped and mirrored."""

import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.gpu import cifar
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Skipped


@pytest.fixture
def folder(tmp_path):
    """Two classes of plain images, whose grey tells the class, the split and the number."""
    for split, count in (("train", 3), ("test", 2)):
        for label, name in enumerate(("ant", "bee")):
            path = tmp_path / "data" / split / name
            path.mkdir(parents=True)
            for number in range(count):
                grey = 100 * label + 10 * number + (split == "test")
                image = Image.fromarray(np.full((32, 32, 3), grey, dtype=np.uint8))
                image.save(path / f"{number}.png")
    return tmp_path / "data"


@pytest.mark.parametrize("packed", [False, True])
def test_images_are_read_from_a_folder_or_an_archive(folder, tmp_path, packed):
    path = folder
    if packed:
        path = tmp_path / "data.tar.xz"
        with tarfile.open(path, "w:xz") as archive:
            for split in ("train", "test"):
                archive.add(folder / split, split)
    train, test = cifar.read(Place(torch.device("cpu"), cifar10=path))
    assert train[0].dtype == torch.uint8
    assert train[0].shape == (6, 3, 32, 32)
    assert train[0][:, 0, 0, 0].tolist() == [0, 10, 20, 100, 110, 120]
    assert train[1].tolist() == [0, 0, 0, 1, 1, 1]
    assert test[0][:, 0, 0, 0].tolist() == [1, 11, 101, 111]
    assert test[1].tolist() == [0, 0, 1, 1]


def test_data_that_are_not_there_are_skipped(tmp_path):
    with pytest.raises(Skipped, match="needs data: --cifar10 PATH"):
        cifar.read(Place(torch.device("cpu")))
    with pytest.raises(Skipped, match=r"no images in train/<class>/, and test/ or val/"):
        cifar.read(Place(torch.device("cpu"), cifar10=tmp_path))


def test_crops_are_pieces_of_the_image_and_half_of_them_are_mirrored():
    height, size, count = 9, 6, 400
    # Each pixel tells its place: 10 y + x, with its channel in the hundreds.
    y, x = torch.meshgrid(torch.arange(height), torch.arange(height), indexing="ij")
    image = torch.stack([100 * channel + 10 * y + x for channel in range(3)])
    generator = torch.Generator().manual_seed(0)
    crops = cifar.augmented(image.expand(count, -1, -1, -1), size, generator)
    assert crops.shape == (count, 3, size, size)
    seen = set()
    for crop in crops:
        step = int(crop[0, 0, 1] - crop[0, 0, 0])
        assert step in (1, -1)
        plain = crop if step == 1 else crop.flip(2)
        top, left = divmod(int(plain[0, 0, 0]), 10)
        assert torch.equal(plain, image[:, top : top + size, left : left + size])
        seen.add((top, left, step))
    assert len(seen) == 2 * (height - size + 1) ** 2
    mirrored = sum(int(crop[0, 0, 1] < crop[0, 0, 0]) for crop in crops)
    assert 150 < mirrored < 250
