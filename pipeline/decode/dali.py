"""Decoding and transforming with NVIDIA DALI, on the CPU or on the GPU, in the background.

DALI decodes and resizes on its own threads (and stream) while the training step runs; the encoded
images, and where they are cut, come with each request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch

from ..sources import Encoded
from .batch import Batch, Form, Made, Request, Upload, ahead
from .crops import Transform
from .reader import Reader

Inputs = tuple[Any, ...]

_REPEATS = 4


@dataclass
class _Iteration:
    """Requests on their way through a pipeline.

    DALI reads its inputs where they lie, so they are kept until their batch came out, and as many
    batches after as it says.

    Attributes:
        requests: that are not yet in the pipeline.
        used: inputs of batches that came out last.
        under_way: what is in the pipeline.
        pipeline: of DALI.
    """

    requests: Iterator[Request]
    used: deque[Inputs]
    under_way: deque[tuple[Request, Inputs]] = field(default_factory=deque)
    pipeline: Any = None


class DaliBackend:
    """Turns requests into batches.

    Args:
        reader: makes requests anew where an image cannot be decoded.
        transform: what is done to images.
        form: how they lie in memory; DALI writes them so at once, nothing is converted after it.
        max_batch: the most images in a request.
        device: where batches are wanted.
        gpu: decode and transform on ``device`` rather than on the CPU.
        threads: of DALI's CPU pool.
        prefetch: batches made ahead of the one that was asked for.
    """

    def __init__(
        self,
        reader: Reader,
        transform: Transform,
        form: Form,
        *,
        max_batch: int,
        device: torch.device,
        gpu: bool,
        threads: int,
        prefetch: int,
    ) -> None:
        self._reader = reader
        self._transform = transform
        self._form = form
        self._device = device
        self._gpu = gpu
        self._upload = Upload(device)
        self._options: dict[str, Any] = {
            "batch_size": max_batch,
            "num_threads": threads,
            "device_id": (device.index or 0) if gpu else None,
            "prefetch_queue_depth": prefetch,
        }
        self._prefetch = prefetch
        self._ended: _Iteration | None = None

    @property
    def version(self) -> str:
        """Of DALI."""
        from nvidia.dali import __version__

        return str(__version__)

    def __call__(self, requests: Iterator[Request]) -> Iterator[Made]:
        """Yield the batch of each request, in order."""
        if self._gpu:
            # In the caller's thread: DALI orders the memory of batches on the stream that they
            # are used on.
            yield from self._batches(requests)
            return
        batches = (self._upload.send(made) for made in self._batches(requests))
        for sent in ahead(batches, 1):
            yield self._upload.receive(sent)

    def _batches(self, requests: Iterator[Request]) -> Iterator[Made]:
        # One that was given up has batches of its own in its pipeline, which may still run.
        iteration, self._ended = self._ended, None
        if iteration is None:
            iteration = self._start(requests)
        else:
            iteration.requests = requests
            iteration.pipeline.reset()
        while True:
            try:
                outputs = iteration.pipeline.run(*self._stream())
            except StopIteration:
                self._ended = iteration
                return
            except RuntimeError as error:
                failed = [request for request, _ in iteration.under_way]
                again = self._reader.mend(failed, self._decodes, error)
                iteration = self._start(chain(again, iteration.requests))
                continue
            request, inputs = iteration.under_way.popleft()
            iteration.used.append(inputs)
            labels = torch.from_numpy(request.labels)
            if self._gpu:
                labels = labels.pin_memory().to(self._device, non_blocking=True)
            yield Made(Batch(self._images(outputs[0]), labels), request)

    def _images(self, output: Any) -> torch.Tensor:
        # With DALI's dynamic executor the tensor owns its memory; nothing is copied.
        images: torch.Tensor = torch.from_dlpack(output.as_tensor())
        # NHWC is what torch calls channels_last: only the order in which sizes are told differs.
        return images.permute(0, 3, 1, 2) if self._channels_last else images

    @property
    def _channels_last(self) -> bool:
        return self._form.memory_format is torch.channels_last

    def _stream(self) -> tuple[Any, ...]:
        return (torch.cuda.current_stream(self._device),) if self._gpu else ()

    def _start(self, requests: Iterator[Request]) -> _Iteration:
        iteration = _Iteration(requests, deque(maxlen=self._prefetch + 1))

        def feed() -> Inputs:
            """The inputs of the next batch; StopIteration when there is none."""
            request = next(iteration.requests)
            inputs = self._inputs(request)
            iteration.under_way.append((request, inputs))
            return inputs

        iteration.pipeline = self._graph(feed, whole=True, **self._options)
        return iteration

    def _inputs(self, request: Request) -> Inputs:
        cut = request.cut
        room = cut.resized - request.image_size
        return (
            request.contents,
            cut.region[:, :2].astype(np.int32),
            cut.region[:, 2:].astype(np.int32),
            cut.resized[:, ::-1].astype(np.float32),
            # DALI places crops by their share of the room there is
            (cut.corner / np.maximum(room, 1)).astype(np.float32),
            cut.mirrored.astype(np.int32),
            np.full(len(request.contents), request.image_size, dtype=np.float32),
        )

    def _graph(self, feed: Callable[[], Inputs], *, whole: bool, **options: Any) -> Any:
        """A pipeline fed by ``feed``; decoding alone, if it is not to be ``whole``."""
        from nvidia.dali import fn, pipeline_def, types

        mean = [255 * value for value in self._transform.mean]
        std = [255 * value for value in self._transform.std]

        @pipeline_def(exec_dynamic=True, **options)  # type: ignore[untyped-decorator]
        def pipeline() -> Any:
            encoded, start, shape, *rest = fn.external_source(
                source=feed, num_outputs=7 if whole else 3, batch=True, no_copy=True
            )
            image = self._decoder(encoded, start=start, shape=shape, axis_names="WH")
            if not whole:
                return image
            resized, position, mirrored, size = rest
            image = fn.resize(image, size=resized, interp_type=types.INTERP_LINEAR, antialias=True)
            return fn.crop_mirror_normalize(
                image,
                crop_h=size,
                crop_w=size,
                crop_pos_x=position[0],
                crop_pos_y=position[1],
                mirror=mirrored,
                mean=mean,
                std=std,
                dtype=types.FLOAT16 if self._form.dtype is torch.float16 else types.FLOAT,
                output_layout="HWC" if self._channels_last else "CHW",
            )

        built = pipeline()
        built.build()
        return built

    def _decoder(self, encoded: Any, **region: Any) -> Any:
        from nvidia.dali import fn, types

        return fn.decoders.image_slice(
            encoded,
            **region,
            # mixed: JPEG on the GPU's decoder where it has one, what it does not know on the CPU
            device="mixed" if self._gpu else "cpu",
            output_type=types.RGB,
            adjust_orientation=False,
            # as the CPU decodes; the faster way costs accuracy where training did not use it
            jpeg_fancy_upsampling=True,
        )

    def time_stages(self, request: Request) -> tuple[float, float]:
        """Seconds that decoding a request and transforming it take on one thread."""
        decode_seconds = self._least_seconds(request, whole=False)
        return decode_seconds, max(self._least_seconds(request, whole=True) - decode_seconds, 0.0)

    def _least_seconds(self, request: Request, *, whole: bool) -> float:
        inputs = self._inputs(request)[: None if whole else 3]
        options = {"batch_size": len(request.contents), "num_threads": 1, "prefetch_queue_depth": 1}
        pipeline = self._graph(lambda: inputs, whole=whole, **(self._options | options))
        seconds = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            pipeline.run(*self._stream())
            if self._gpu:
                torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    def _decodes(self, content: Encoded) -> bool:
        """Whether DALI can decode an image, tried alone."""
        from nvidia.dali import fn, pipeline_def

        options = self._options | {"batch_size": 1, "prefetch_queue_depth": 1}

        @pipeline_def(exec_dynamic=True, **options)  # type: ignore[untyped-decorator]
        def pipeline() -> Any:
            encoded = fn.external_source(source=lambda: [content], batch=True)
            return self._decoder(encoded, start=(0.0, 0.0), shape=(1.0, 1.0), axis_names="WH")

        alone = pipeline()
        alone.build()
        try:
            alone.run()
        except RuntimeError:
            return False
        return True
