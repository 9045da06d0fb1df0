"""The choice of a back end."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from nvidia.dali import fn

from largebatch.pipeline import Stage
from largebatch.pipeline.decode import backends, nvimgcodec
from largebatch.pipeline.decode.backends import choose, default_prefetch
from largebatch.pipeline.decode.batch import MemoryLayout
from largebatch.pipeline.decode.dali import DaliBackend
from tests.conftest import refused
from tests.pipeline.loaders import SMALL, loader

HOPPER = {"hw_decoder_load": 0.95, "preallocate_width_hint": 5980, "preallocate_height_hint": 6430}


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


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"backend": "dali-gpu"}, "dali-gpu needs a CUDA device, not cpu"),
        ({"backend": "ffcv"}, "unknown backend 'ffcv'; valid: auto, dali-gpu, nvimgcodec, dali"),
        ({"hw_decoder_load": 1.5}, "hw_decoder_load: 1.5 is not valid; valid: 0 to 1"),
        ({"batch_size": 0}, "batch_size: 0 is not valid; valid: at least 1"),
        ({"micro_batch_size": 0}, "micro_batch_size: 0 is not valid; valid: at least 1"),
        ({"threads": -1}, "threads: -1 is not valid; valid: at least 1"),
        ({"prefetch": 0}, "prefetch: 0 is not valid; valid: at least 1"),
        ({"seed": -1}, "seed: -1 is not valid; valid: at least 0"),
        ({"rank": 2, "world_size": 2}, "rank: 2 is not valid; valid: from 0, below world"),
        ({"repeats": 0}, "repeats: 0 is not valid; valid: at least 1"),
        ({"on_error": "ignore"}, "unknown on_error 'ignore'; valid: stop, skip"),
        ({"verify": "all"}, "unknown verify 'all'; valid: decode, strict"),
        ({"dtype": torch.bfloat16}, "dtype: torch.bfloat16 is not valid; valid: torch.float32"),
    ],
)
def test_options_that_are_unknown_or_cannot_be_used_are_refused(photos, option, message):
    refused(message, loader, photos, **option)


def test_dali_uses_the_jpeg_decoders_of_hopper(monkeypatch):
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    options = {"max_batch": 2, "threads": 1, "prefetch": 2}
    for capability, device, given, hints in (
        (8, gpu, None, {}),
        (8, gpu, 0.7, {"hw_decoder_load": 0.7}),
        (9, gpu, None, HOPPER),
        (9, gpu, 0.0, HOPPER | {"hw_decoder_load": 0.0}),
        (10, gpu, None, HOPPER),
        (9, cpu, 0.7, {}),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: (c, 0))
        options |= {"device": device, "gpu": device == gpu, "hw_decoder_load": given}
        backend = DaliBackend(None, SMALL, MemoryLayout(), **options)
        with mock.patch.object(fn.decoders, "image_slice") as decoder:
            backend._decoder("encoded")
        arguments = decoder.call_args.kwargs
        assert {name: arguments[name] for name in arguments if name in HOPPER} == hints
        assert arguments["device"] == ("mixed" if device == gpu else "cpu")
        assert default_prefetch("dali-gpu", device) == (4 if HOPPER.items() & hints.items() else 2)
        assert default_prefetch("dali-cpu", device) == 2
