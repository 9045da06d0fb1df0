"""The choice of a back end."""

from dataclasses import replace

import pytest
import torch

from largebatch.pipeline import DataError, ImageFolder, Loader, Stage, Transform
from largebatch.pipeline.decode import backends, nvimgcodec
from largebatch.pipeline.decode.backends import choose

SMALL = Transform(image_size=24, eval_resize=28)


def loader(root, transform=SMALL, **options):
    return Loader(ImageFolder(root), transform, batch_size=12, epochs=2, threads=1, **options)


def test_auto_uses_the_fastest_that_is_installed(photos, monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert loader(photos).backend == "dali-cpu"  # its images are small
    assert loader(photos, replace(SMALL, image_size=192, eval_resize=192)).backend == "nvimgcodec"
    growing = [Stage(1, image_size=192)]
    assert loader(photos, stages=growing).backend == "nvimgcodec"
    assert choose("auto", gpu, 32) == choose("auto", gpu, 224) == "dali-gpu"
    monkeypatch.setattr(backends, "_has_dali", lambda: False)
    assert choose("auto", cpu, 32) == choose("auto", gpu, 224) == "nvimgcodec"
    with pytest.raises(
        DataError, match=r"backend dali-cpu needs nvidia.dali, which is not installed: pip install"
    ):
        loader(photos, backend="dali-cpu")
    monkeypatch.setattr(nvimgcodec, "OLDEST", "1000.0")
    assert choose("auto", cpu, 224) == choose("auto", gpu, 224) == "torchvision"
    with pytest.raises(
        DataError, match=r"nvimgcodec needs nvidia.nvimgcodec 1000.0 or later, which is not inst"
    ):
        loader(photos, backend="nvimgcodec")
    monkeypatch.setattr(backends, "_has_dali", lambda: True)
    assert choose("auto", cpu, 224) == "dali-cpu"


def test_an_unusable_backend_is_refused(photos):
    with pytest.raises(DataError, match="dali-gpu needs a CUDA device, not cpu"):
        loader(photos, backend="dali-gpu")
    with pytest.raises(
        DataError, match="unknown backend 'ffcv'; valid: auto, dali-gpu, nvimgcodec, dali"
    ):
        loader(photos, backend="ffcv")
