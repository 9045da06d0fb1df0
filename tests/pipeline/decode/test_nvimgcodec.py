"""Decoding with nvImageCodec: the pixels, the memory and the threads."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from benchmarks.pipeline.odd_images import encode
from largebatch.pipeline import Transform
from largebatch.pipeline.decode.batch import MemoryLayout, Request
from largebatch.pipeline.decode.crops import Crop
from largebatch.pipeline.decode.memory import BatchMemory
from largebatch.pipeline.decode.normalise import Normalisation
from largebatch.pipeline.decode.nvimgcodec import NvimgcodecBackend
from largebatch.pipeline.decode.pillow import decode
from largebatch.pipeline.decode.torchvision import TorchvisionBackend
from tests.pipeline import loaders

LEVELS = Transform(**loaders.LEVELS)
SUBSAMPLING = st.sampled_from(["4:4:4", "4:2:2", "4:2:0"])
FORMATS = [torch.contiguous_format, torch.channels_last]
CPU = {"device": torch.device("cpu"), "threads": 1, "prefetch": 1}


@settings(max_examples=100)
@given(st.data())
def test_any_crop_of_any_jpeg_has_the_pixels_of_pillow_and_torchvision(data):
    def number(low, high):
        return data.draw(st.integers(low, high))

    width, height = number(1, 90), number(1, 90)
    coarse = np.random.default_rng(number(0, 999)).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    mode, subsampling = data.draw(st.sampled_from(["RGB", "L", "CMYK"])), data.draw(SUBSAMPLING)
    options = {"progressive": data.draw(st.booleans()), "subsampling": subsampling}
    content = encode(image.convert(mode), "JPEG", quality=number(30, 100), **options)
    x, y = number(0, width - 1), number(0, height - 1)
    region = [x, y, number(1, width - x), number(1, height - y)]
    crop = Crop(
        region=np.array([region]),
        resized=np.array([[number(1, 90), number(1, 90)]]),
        corner=np.array([[number(-5, 5), number(-5, 5)]]),
        mirrored=np.array([data.draw(st.booleans())]),
    )
    one, encoded = np.zeros(1, np.int64), [np.frombuffer(content, np.uint8)]
    request = Request(one, one, encoded, crop, image_size=24, wanted=one, uniforms=None)
    layout = MemoryLayout(memory_format=data.draw(st.sampled_from(FORMATS)))
    found, expected = (
        BatchMemory().empty((1, 3, 24, 24), torch.float32, layout.memory_format)[0]
        for _ in range(2)
    )
    backend = NvimgcodecBackend(None, LEVELS, layout, **CPU)
    backend._image(request, 0, found)
    if mode == "L" or subsampling == "4:4:4" or region == [0, 0, width, height]:
        TorchvisionBackend(None, LEVELS, layout, **CPU)._image(request, 0, expected)
        assert (found - expected).abs().max() < 2.5
        return
    # At the edges of a region of subsampled chroma, a decoder of regions interpolates less.
    whole = np.asarray(decode(request.contents[0])).astype(int)
    of_region = whole[y : y + region[3], x : x + region[2]] - backend._region(request, 0)
    assert np.abs(of_region[2:-2, 2:-2]).max(initial=0) <= 2


def test_decoding_threads_start_no_others_and_do_not_keep_a_process_alive(photos):
    """torch would start a team of OpenMP threads in each, for operations of 32,768 elements.

    At the end, images wait to be decoded. The pool cancels them, and the thread that waits for
    their batch must notice.
    """
    script = f"""
import os, threading, torch
from largebatch.pipeline import ImageFolder, Loader, Transform
torch.set_num_threads(8)
before = len(os.listdir("/proc/self/task"))
transform, source = Transform(image_size=128, eval_resize=128), ImageFolder({str(photos)!r})
options = {{"backend": "nvimgcodec", "batch_size": 48, "threads": 2}}
batches = iter(Loader(source, transform, **options))
for _ in range(3):
    next(batches)
print(len(os.listdir("/proc/self/task")) - before, threading.active_count() - 1)
batches.close()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    threads, of_python = map(int, done.stdout.split())
    assert 2 < threads <= of_python


@given(
    st.integers(0, 999),
    st.sampled_from(FORMATS),
    st.sampled_from([torch.float32, torch.float16]),
    st.tuples(*3 * [st.floats(0, 1)]),
    st.tuples(*3 * [st.floats(0.01, 1)]),
)
def test_both_normalisations_give_the_same_bits(seed, memory_format, dtype, mean, std):
    layout = MemoryLayout(dtype, memory_format)
    normalisation = Normalisation(Transform(mean=mean, std=std), layout)
    levels = np.random.default_rng(seed).integers(0, 256, (2, 5, 7, 3), dtype=np.uint8)
    tensor = torch.from_numpy(levels).permute(0, 3, 1, 2)
    of_batch = normalisation.batch(tensor)
    one_by_one = BatchMemory().empty((2, 3, 5, 7), dtype, memory_format)
    for target, image in zip(one_by_one, levels, strict=True):
        normalisation.into(target, image)
    assert torch.equal(of_batch, one_by_one)
    assert of_batch.stride() == one_by_one.stride()
    factors = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (mean, std))
    expected = torch.sub(tensor.double() / 255, next(factors)) / next(factors)
    error = {torch.float32: 1e-6, torch.float16: 1e-3}[dtype]
    assert torch.allclose(of_batch.double(), expected, rtol=error, atol=error / min(std))
