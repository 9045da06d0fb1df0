"""The choice of a back end."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from nvidia.dali import Pipeline, fn

from largebatch.pipeline import ImageFolder, Loader, Stage, Transform
from largebatch.pipeline.decode import backends, nvimgcodec
from largebatch.pipeline.decode.backends import choose, default_prefetch
from largebatch.pipeline.decode.batch import MemoryLayout
from largebatch.pipeline.decode.dali import DaliBackend
from tests.conftest import refused

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
    message = "backend dali-cpu needs nvidia.dali, which is not installed: pip install"
    refused(message, loader, photos, backend="dali-cpu")
    monkeypatch.setattr(nvimgcodec, "OLDEST", "1000.0")
    assert choose("auto", cpu, 224) == choose("auto", gpu, 224) == "torchvision"
    message = "nvimgcodec needs nvidia.nvimgcodec 1000.0 or later, which is not inst"
    refused(message, loader, photos, backend="nvimgcodec")
    with monkeypatch.context() as patch:  # after `pip install .`
        patch.setattr(backends, "_installed", lambda name: False)
        refused(r"needs torchvision and Pillow.*largebatch\[recipes\]", loader, photos)
    monkeypatch.setattr(backends, "_has_dali", lambda: True)
    assert choose("auto", cpu, 224) == "dali-cpu"


def test_an_unusable_backend_is_refused(photos):
    refused("dali-gpu needs a CUDA device, not cpu", loader, photos, backend="dali-gpu")
    message = "unknown backend 'ffcv'; valid: auto, dali-gpu, nvimgcodec, dali"
    refused(message, loader, photos, backend="ffcv")
    message = "hw_decoder_load: 1.5 is no share; valid: 0 to 1"
    refused(message, loader, photos, hw_decoder_load=1.5)


def decoder_arguments(device, load):
    """The arguments of DALI's decoder on ``device``; DALI itself checks that it has them."""
    backend = DaliBackend(
        None, SMALL, MemoryLayout(), max_batch=2, device=device, gpu=device.type == "cuda",
        threads=1, prefetch=2, hw_decoder_load=load,
    )  # fmt: skip
    original = fn.decoders.image_slice
    with (
        Pipeline(batch_size=2, num_threads=1, device_id=0),
        mock.patch.object(fn.decoders, "image_slice", side_effect=original) as decoder,
    ):
        backend._decoder(fn.external_source(), start=(0.0, 0.0), shape=(1.0, 1.0))
    return decoder.call_args.kwargs


@pytest.mark.parametrize(
    ("capability", "given", "load", "hints", "prefetch"),
    [
        ((8, 0), None, None, (None, None), 2),
        ((8, 0), 0.7, 0.7, (None, None), 2),
        ((9, 0), None, 0.95, (5980, 6430), 4),
        ((9, 0), 0.0, 0.0, (5980, 6430), 4),
        ((10, 0), None, 0.95, (5980, 6430), 4),
    ],
)
def test_dali_uses_the_jpeg_decoders_of_hopper(
    monkeypatch, capability, given, load, hints, prefetch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    arguments = decoder_arguments(gpu, given)
    assert arguments["device"] == "mixed"
    assert arguments.get("hw_decoder_load") == load
    assert (
        arguments.get("preallocate_width_hint"),
        arguments.get("preallocate_height_hint"),
    ) == hints
    assert default_prefetch("dali-gpu", gpu) == prefetch
    assert default_prefetch("dali-cpu", gpu) == default_prefetch("dali-cpu", cpu) == 2
    assert not {"hw_decoder_load", "preallocate_width_hint"} & {*decoder_arguments(cpu, given)}
