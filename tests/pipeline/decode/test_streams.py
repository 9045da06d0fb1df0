"""Batches reach the stream that uses them whole, in whatever order CUDA streams run.

The code runs on a model of streams and allocators (tests/streams.py).
"""

from collections import deque
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from largebatch.pipeline import Transform
from largebatch.pipeline.decode import dali
from largebatch.pipeline.decode.batch import Batch, DecodedBatch, MemoryLayout, Request, Upload
from largebatch.pipeline.decode.dali import DaliBackend
from largebatch.pipeline.decode.normalise import Normalisation
from tests.streams import Machine, Stream

CUDA = torch.device("cuda", 0)
BATCHES = 6

schedules = st.integers(0, 2**32 - 1)


def wrong_batches(seed, batches):
    """Return the batches that the compute stream reads wrongly, each freed after use."""
    read = []
    with Machine(seed) as machine:
        for number, batch in enumerate(batches(machine)):
            sums = [tensor + 0 for tensor in batch]
            read += [(number, value.sum(), value.numel()) for value in sums]
            del batch, sums
            torch.ones(100).to("cuda:0").mul_(3)  # the step allocates memory of its own
        machine.synchronize()
    return [number for number, total, count in read if total.raw != number * count]


def uploaded(machine, images=None, finish=None, ahead=2):
    """Send batches, by default such as hold their number, some before the first is used."""
    upload, sent = Upload(CUDA, finish), deque()
    for number in range(BATCHES):
        batch = torch.full((2, 3, 4, 4), float(number)) if images is None else images(number)
        sent.append(upload.send(DecodedBatch(Batch(batch, torch.full((2,), number)), None)))
        del batch
        if len(sent) > ahead:
            yield upload.receive(sent.popleft()).batch
    while sent:
        yield upload.receive(sent.popleft()).batch


@settings(max_examples=25)
@given(schedules)
def test_uploaded_batches_are_whole(seed):
    assert not wrong_batches(seed, uploaded)


@settings(max_examples=25)
@given(schedules, st.sampled_from([torch.contiguous_format, torch.channels_last]))
def test_bytes_that_the_gpu_normalises_are_whole(seed, memory_format):
    transform = Transform(mean=(0.1, 0.2, 0.3), std=(0.2, 0.4, 0.8))
    normalisation = Normalisation(transform, MemoryLayout(torch.float16, memory_format))
    images = torch.randint(256, (BATCHES, 2, 3, 4, 4), dtype=torch.uint8)
    found = []

    def levels(number):
        return images[number].contiguous(memory_format=torch.channels_last)

    with Machine(seed) as machine:
        for batch in uploaded(machine, levels, normalisation.batch):
            found.append(batch.images + 0)
            del batch
            torch.ones(100).to("cuda:0").mul_(3)
        machine.synchronize()
    for ours, batch in zip(found, images, strict=True):
        assert torch.equal(ours.raw, normalisation.batch(batch))
        assert ours.raw.is_contiguous(memory_format=memory_format)


def from_dali(machine):
    """Run the back end for the GPU on a pipeline whose images hold the number of the batch.

    DALI puts its output on the stream that ``run`` is given. It reuses the memory of a DLPack
    tensor when all work is done that the device had when the tensor was deleted.
    """
    pool = Stream(CUDA)
    backend = DaliBackend(
        None, None, MemoryLayout(), max_batch=2, device=CUDA, gpu=True, threads=1, prefetch=2
    )

    class Pipeline:
        def run(self, stream):
            assert stream is torch.cuda.current_stream()
            request = next(iteration.requests, None)
            if request is None:
                raise StopIteration
            iteration.under_way.append((request, ()))
            with torch.cuda.stream(pool):
                made = torch.full((2, 3, 4, 4), float(request.labels[0])).to(CUDA)
            stream.wait_stream(pool)
            for other in machine.streams:
                made.record_stream(other)
            return (SimpleNamespace(as_tensor=lambda: made),)

    numbers = [np.full(2, number) for number in range(BATCHES)]
    requests = iter([Request(n, n, [], None, 4, n, None) for n in numbers])
    iteration = dali._Iteration(requests, deque(maxlen=3), pipeline=Pipeline())
    with (
        mock.patch.object(backend, "_start", return_value=iteration),
        mock.patch.object(torch, "from_dlpack", lambda tensor: tensor),
    ):
        for decoded in backend(requests):
            batch = decoded.batch
            del decoded
            yield batch


@settings(max_examples=25)
@given(schedules)
def test_batches_of_dali_are_whole(seed):
    assert not wrong_batches(seed, from_dali)
