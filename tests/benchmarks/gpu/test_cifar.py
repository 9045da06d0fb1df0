"""CIFAR-10 on the GPU: how its images are read, and the steps to an accuracy."""

import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.gpu import cifar, cifar_images, report
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Report
from largebatch.recipes.schema.load import load


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
    train, test = cifar_images.read(Place(torch.device("cpu"), cifar10=path))
    assert train[0].dtype == torch.uint8
    assert train[0].shape == (6, 3, 32, 32)
    assert train[0][:, 0, 0, 0].tolist() == [0, 10, 20, 100, 110, 120]
    assert train[1].tolist() == [0, 0, 0, 1, 1, 1]
    assert test[0][:, 0, 0, 0].tolist() == [1, 11, 101, 111]
    assert test[1].tolist() == [0, 0, 1, 1]


def comparison(tmp_path, monkeypatch, top1_of):
    """A comparison whose runs are computed from their overrides, and its report."""
    made = []

    def train(overrides, train_split, test_split, place):
        recipe = load(cifar.RECIPE, overrides).recipe
        made.append((recipe, len(train_split[1]), len(test_split[1])))
        steps = recipe.epochs * 50_000 / recipe.batch_size
        return {"top1": top1_of(recipe), "seconds": 0.01, "steps": steps}

    monkeypatch.setattr(cifar, "train", train)
    file = tmp_path / "results.json"
    report.write(file, {"parts": {}})
    found = Report(file, "cifar", cifar.TITLE, 60)
    images = torch.zeros(6000, 3, 1, 1, dtype=torch.uint8)
    splits = (images, torch.zeros(6000)), (images[:100], torch.zeros(100))
    place = Place(torch.device("cpu"))
    return cifar.Comparison(found, place, *splits), found, made


def test_nothing_is_begun_when_the_time_is_over(tmp_path, monkeypatch):
    tuning, found, made = comparison(tmp_path, monkeypatch, lambda recipe: 95.0)
    monkeypatch.setattr(Report, "seconds_left", property(lambda self: 9.0 - 2 * len(made)))
    cells = {cifar.Cell("Muon", batch): (0.3, 94.5) for batch in (2048, 4096)}
    tuning.finals(cells, range(20))
    assert len(made) == 5
    assert len(found.content["skipped"]) == 1


def test_steps_to_an_accuracy():
    points = [(400.0, 95.0), (100.0, 93.0), (200.0, 94.0)]
    assert cifar.steps_to(94.0, points) == pytest.approx(200)
    assert cifar.steps_to(93.5, points) == pytest.approx(100 * 2**0.5)
    assert cifar.steps_to(90.0, points) == 100
    assert cifar.steps_to(96.0, points) is None
