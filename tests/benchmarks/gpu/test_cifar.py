"""CIFAR-10 on the GPU: how its images are read and cropped, and the steps to an accuracy."""

import math
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.gpu import cifar, cifar_images
from benchmarks.gpu.place import Place


def test_images_are_read_from_a_folder(tmp_path):
    for split, count in (("train", 3), ("val", 2)):
        for label, name in enumerate(("ant", "bee")):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                grey = 100 * label + 10 * number + (split == "val")
                image = Image.fromarray(np.full((32, 32, 3), grey, dtype=np.uint8))
                image.save(tmp_path / split / name / f"{number}.png")
    train, test = cifar_images.read(Place(torch.device("cpu"), cifar10=tmp_path))
    assert train[0].shape == (6, 3, 36, 36)
    found = (train[0][:, 0, 5, 5] * 0.2470 + 0.4914) * 255
    assert found.tolist() == pytest.approx([0, 10, 20, 100, 110, 120], abs=1e-3)
    assert train[1].tolist() == [0, 0, 0, 1, 1, 1]
    assert test[1].tolist() == [0, 0, 1, 1]


def test_batches_have_each_image_once_in_an_epoch_and_mirrored_in_every_other():
    ramp = torch.arange(36.0).expand(6, 3, 36, 36).clone() + 100 * torch.arange(6.0).view(
        6, 1, 1, 1
    )
    seen, mirrored = [], []
    for images, chosen in islice(cifar_images.batches(ramp, 4, 0), 6):
        assert images.shape == (4, 3, 32, 32)
        assert images.is_contiguous(memory_format=torch.channels_last)
        steps = images[:, 0, 0, 1] - images[:, 0, 0, 0]  # 1, or -1 if mirrored
        least = images.amin((1, 2, 3)) - 100 * chosen
        assert steps.abs().tolist() == [1] * 4
        assert all(0 <= shift <= 4 for shift in least.tolist())
        seen += chosen.tolist()
        mirrored += (steps < 0).tolist()
    epochs = [dict(zip(seen[i : i + 6], mirrored[i : i + 6], strict=True)) for i in range(0, 24, 6)]
    assert all(sorted(epoch) == [*range(6)] for epoch in epochs)
    for even, odd in pairwise(epochs):
        assert all(even[image] != odd[image] for image in even)


def test_steps_to_an_accuracy():
    points = [(400.0, 95.0), (100.0, 93.0), (200.0, 94.0)]
    assert cifar.steps_to(94.0, points) == pytest.approx(200)
    assert cifar.steps_to(93.5, points) == pytest.approx(100 * 2**0.5)
    assert cifar.steps_to(90.0, points) == 100
    assert cifar.steps_to(96.0, points) == math.inf
