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
from tests.pipeline.loaders import LEVELS
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


def uploaded(finish, ahead=2):
    """Send batches that hold their number, some before the first is used."""
    upload, sent = Upload(CUDA, finish), deque()
    for number in range(BATCHES):
        batch = Batch(torch.full((2, 3, 4, 4), float(number)), torch.full((2,), number))
        sent.append(upload.send(DecodedBatch(batch, None)))
        del batch
        if len(sent) > ahead:
            yield upload.receive(sent.popleft()).batch
    while sent:
        yield upload.receive(sent.popleft()).batch


@settings(max_examples=25)
@given(schedules, st.booleans())
def test_uploaded_batches_are_whole(seed, normalised):
    """Also those that are normalised on the device: here by a mean of 0 and a factor of 1."""
    finish = Normalisation(Transform(**LEVELS), MemoryLayout()).batch if normalised else None
    assert not wrong_batches(seed, lambda machine: uploaded(finish))


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
