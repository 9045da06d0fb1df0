"""CIFAR-10 on the GPU: its images, the tuning of rates, and the steps to an accuracy."""

import math
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.gpu import cifar, cifar_images, report
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Report, Skipped
from largebatch.recipes.models.airbench import Airbench
from largebatch.recipes.models.build import build_model
from largebatch.recipes.models.optimizers import build_optimizer
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


def test_data_that_are_not_there_are_skipped(tmp_path):
    with pytest.raises(Skipped, match="needs data: --cifar10 PATH"):
        cifar_images.read(Place(torch.device("cpu")))
    with pytest.raises(Skipped, match=r"no images in train/<class>/, and test/ or val/"):
        cifar_images.read(Place(torch.device("cpu"), cifar10=tmp_path))


def test_crops_are_pieces_of_the_image_and_mirrored_where_asked():
    height, size, count = 9, 6, 400
    # Each pixel tells its place: 10 y + x, with its channel in the hundreds.
    y, x = torch.meshgrid(torch.arange(height), torch.arange(height), indexing="ij")
    image = torch.stack([100 * channel + 10 * y + x for channel in range(3)])
    generator = torch.Generator().manual_seed(0)
    mirrored = torch.arange(count) % 3 == 0
    crops = cifar_images.augmented(image.expand(count, -1, -1, -1), mirrored, size, generator)
    assert crops.shape == (count, 3, size, size)
    seen = set()
    for crop, flipped in zip(crops, mirrored, strict=True):
        step = int(crop[0, 0, 1] - crop[0, 0, 0])
        assert step == (-1 if flipped else 1)
        plain = crop if step == 1 else crop.flip(2)
        top, left = divmod(int(plain[0, 0, 0]), 10)
        assert torch.equal(plain, image[:, top : top + size, left : left + size])
        seen.add((top, left, step))
    assert len(seen) == 2 * (height - size + 1) ** 2


def test_an_epoch_has_every_image_once_and_mirrors_the_other_half():
    order = cifar_images.Order(40, 7, torch.device("cpu"))
    taken = [order.take(16) for _ in range(10)]  # four epochs
    indices, mirrored = (torch.cat(parts).view(4, 40) for parts in zip(*taken, strict=True))
    by_image = torch.stack([m[i.argsort()] for i, m in zip(indices, mirrored, strict=True)])
    assert all(sorted(epoch) == list(range(40)) for epoch in indices.tolist())
    assert torch.equal(by_image[0], by_image[2])
    assert torch.equal(by_image[1], by_image[3])
    assert torch.equal(by_image[1], ~by_image[0])
    assert 8 < by_image[0].sum() < 32
    assert not torch.equal(indices[0], indices[1])


def test_the_network_is_the_sources_and_every_optimizer_takes_it():
    for cell in (cifar.Cell(name, 4096) for name in cifar.OPTIMIZERS):
        overrides = [*cifar._FULL, *cell.overrides(0.5, 9.6, 3)]
        recipe = load(cifar.RECIPE, overrides).recipe
        assert (recipe.batch_size, recipe.epochs, recipe.seed) == (4096, 9.6, 3)
        model = build_model(recipe.model, 10)
        assert sum(p.numel() for p in model.parameters()) == 1_972_792
        groups = build_optimizer(recipe, model).param_groups
        assert sum(p.numel() for g in groups for p in g["params"]) == 1_972_792 - 24 * 12 - 2 * 576


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


@pytest.mark.parametrize(("best", "runs"), [(1.0, 3), (2.0, 4), (0.25, 5), (100.0, 5)])
def test_rates_are_tuned_around_the_guess_on_held_out_images(tmp_path, monkeypatch, best, runs):
    cell = cifar.Cell("LARS", 4096)

    def top1(recipe):
        return 90 - abs(math.log2(recipe.optimizer.lr / (best * cell.guess)))

    tuning, _, made = comparison(tmp_path, monkeypatch, top1)
    lr, reached = tuning.tune(cell)
    assert lr == pytest.approx(cell.guess * min(best, 8), rel=0.01)
    assert len(made) == runs
    assert {(kept, held) for _, kept, held in made} == {(1000, 5000)}
    assert reached == max(top1(recipe) for recipe, *_ in made)


def test_the_steps_to_the_target_are_read_between_three_lengths(tmp_path, monkeypatch):
    def top1(recipe):  # 94 % at 7 epochs with seed 0, later with other seeds
        return 94 + 2 * math.log2(recipe.epochs / (7 + recipe.seed))

    tuning, found, made = comparison(tmp_path, monkeypatch, top1)
    cell = cifar.Cell("Muon", 2048)
    tuning.finals({cell: (0.3, 94.5)}, range(3))
    assert [round(recipe.epochs, 6) for recipe, *_ in made[:3]] == [6, 8, 10]
    assert {(train, test) for _, train, test in made} == {(6000, 100)}
    cifar.summarise(found, Place(torch.device("cpu")))
    (row,) = found.content["tables"]["steps to 94 % on the test set"]
    per_epoch = 50_000 / 2048
    assert row["median"] == pytest.approx(8 * per_epoch, abs=1)
    assert row["least"] == pytest.approx(7 * per_epoch, abs=1)
    assert row["most"] == pytest.approx(9 * per_epoch, abs=1)
    assert row["reached"] == "3 of 3 seeds"


def test_a_target_that_is_not_reached_is_said_to_be(tmp_path, monkeypatch):
    tuning, found, _ = comparison(tmp_path, monkeypatch, lambda recipe: 91 + recipe.seed)
    tuning.finals({cifar.Cell("LAMB", 8192): (0.3, 92.0)}, range(5))
    cifar.summarise(found, Place(torch.device("cpu")))
    (row,) = found.content["tables"]["steps to 94 % on the test set"]
    assert row["median"] == "not reached"
    assert row["reached"] == "2 of 5 seeds, 2 in the shortest run or less"
    assert found.content["goals"] == []  # a run on the CPU cannot decide them


def test_a_seed_that_the_time_cut_short_is_no_failure(tmp_path, monkeypatch):
    tuning, found, _ = comparison(tmp_path, monkeypatch, lambda r: 93 + 0.9 * (r.epochs > 9))
    cell = cifar.Cell("Muon", 2048)
    for epochs, seed in ((6.0, 0), (8.0, 0), (10.0, 0), (6.0, 1), (8.0, 1)):
        tuning._run(cifar.RUNS, cell, 0.3, epochs, seed, final=True)
    cifar.summarise(found, Place(torch.device("cpu")))
    (row,) = found.content["tables"]["steps to 94 % on the test set"]
    assert row["reached"] == "0 of 1 seeds"


def test_what_is_reached_in_the_shortest_run_is_said(tmp_path, monkeypatch):
    tuning, found, _ = comparison(tmp_path, monkeypatch, lambda recipe: 95.0)
    tuning.finals({cifar.Cell("Muon", 2048): (0.3, 94.5)}, range(2))
    cifar.summarise(found, Place(torch.device("cpu")))
    (row,) = found.content["tables"]["steps to 94 % on the test set"]
    assert row["reached"] == "2 of 2 seeds, 2 in the shortest run or less"
    assert row["median"] == round(6 * 50_000 / 2048)


def test_nothing_is_begun_when_the_time_is_over(tmp_path, monkeypatch):
    tuning, found, made = comparison(tmp_path, monkeypatch, lambda recipe: 95.0)
    monkeypatch.setattr(Report, "seconds_left", property(lambda self: 9.0 - 2 * len(made)))
    cells = {cifar.Cell("Muon", batch): (0.3, 94.5) for batch in (2048, 4096)}
    tuning.finals(cells, range(20))
    assert len(made) == 5
    assert len(found.content["skipped"]) == 1


def test_the_first_layer_is_made_from_images_of_all_classes(monkeypatch):
    labels = torch.arange(10).repeat_interleave(20)
    images = labels[:, None, None, None].expand(-1, 3, 32, 32).to(torch.uint8)
    seen = []
    monkeypatch.setattr(Airbench, "init_from_images", lambda model, images: seen.append(images))
    place = Place(torch.device("cpu"), dry=True)
    keys = [*cifar.Cell("LARS", 64).overrides(0.1, 2.0, 0), "init.images=100"]
    cifar.train(keys, (images, labels), (images[:20], labels[:20]), place)
    assert len(seen[0]) == 100
    assert len(seen[0][:, 0, 0, 0].unique()) == 10


def test_steps_to_an_accuracy():
    points = [(400.0, 95.0), (100.0, 93.0), (200.0, 94.0)]
    assert cifar.steps_to(94.0, points) == pytest.approx(200)
    assert cifar.steps_to(93.5, points) == pytest.approx(100 * 2**0.5)
    assert cifar.steps_to(90.0, points) == 100
    assert cifar.steps_to(96.0, points) is None
