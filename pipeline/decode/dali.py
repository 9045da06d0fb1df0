"""Decoding and transforming with NVIDIA DALI, on the CPU or on the GPU, in the background.

DALI decodes and resizes on its own threads (and stream) while the training step runs. Each request
holds the encoded images and their crops.
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
from .batch import Batch, DecodedBatch, MemoryLayout, Request, Upload, prefetch
from .crops import Transform
from .reader import Reader

Inputs = tuple[Any, ...]

_REPEATS = 4

#: From this compute capability on, Hopper's, a GPU has seven JPEG decoders (an A100 has one), which
#: can take nearly all images. NVIDIA's MLPerf 3.1 configurations for DGX H100 give them 0.99
#: (mxnet/config_DGXH100*.sh); DALI's default, 0.65, is for an A100.
_HOPPER = (9, 0)
_HOPPER_LOAD = 0.95
#: The same configurations prefetch 3 batches on several machines, and 5 on one.
HOPPER_PREFETCH = 4
#: The biggest image of ImageNet, as there: the buffers of these decoders are made once. The memory
#: paddings stay at DALI's defaults (16 MiB a thread, not the 201 and 268 of DALI's example of
#: ResNet-50), since they serve the few images that these decoders leave.
_HOPPER_HINTS = {"preallocate_width_hint": 5980, "preallocate_height_hint": 6430}


def is_hopper(device: torch.device) -> bool:
    """Whether ``device`` is a GPU of the generation of Hopper or a later one."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER


@dataclass
class _Iteration:
    """An iteration over requests and the DALI pipeline that decodes them.

    DALI reads its inputs without copying them, so they are kept until their batch has been
    returned, and for ``prefetch`` further batches as DALI demands.
    """

    requests: Iterator[Request]  # those that have not entered the pipeline
    used: deque[Inputs]  # of the batches returned last
    under_way: deque[tuple[Request, Inputs]] = field(default_factory=deque)  # in the pipeline
    pipeline: Any = None


class DaliBackend:
    """Decodes requests to batches with DALI.

    Args as of :class:`~.threads.ThreadedBackend` and :class:`~largebatch.pipeline.Loader`, and:
        max_batch: Greatest number of images in a request.
        gpu: Whether to decode and transform on ``device`` rather than on the CPU.
    """

    def __init__(
        self,
        reader: Reader,
        transform: Transform,
        layout: MemoryLayout,
        *,
        max_batch: int,
        device: torch.device,
        gpu: bool,
        threads: int,
        prefetch: int,
        hw_decoder_load: float | None = None,
    ) -> None:
        self._reader = reader
        self._transform = transform
        self._layout = layout
        self._channels_last = layout.memory_format is torch.channels_last
        self._device = device
        self._gpu = gpu
        self._hw_decoder_load = hw_decoder_load
        self._upload = Upload(device)
        self._options: dict[str, Any] = {
            "batch_size": max_batch,
            "num_threads": threads,
            "device_id": (device.index or 0) if gpu else None,
            "prefetch_queue_depth": prefetch,
            "exec_dynamic": True,
        }
        self._prefetch = prefetch
        self._ended: _Iteration | None = None

    @property
    def version(self) -> str:
        """Version of DALI."""
        from nvidia.dali import __version__

        return str(__version__)

    def __call__(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        if self._gpu:
            # In the caller's thread, since DALI synchronises the memory of batches with the
            # stream on which they are used.
            yield from self._batches(requests)
            return
        batches = (self._upload.send(decoded) for decoded in self._batches(requests))
        for sent in prefetch(batches, 1):
            yield self._upload.receive(sent)

    def _batches(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        # Reuse only the pipeline of an iteration that ran to its end: one that was abandoned still
        # holds batches, and may still be running.
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
                again = self._reader.remake(failed, error, self._decodes)
                iteration = self._start(chain(again, iteration.requests))
                continue
            request, inputs = iteration.under_way.popleft()
            iteration.used.append(inputs)
            labels = torch.from_numpy(request.labels)
            if self._gpu:  # torch keeps pinned memory until its copies are done
                labels = labels.pin_memory().to(self._device, non_blocking=True)
            yield DecodedBatch(Batch(self._images(outputs[0]), labels), request)

    def _images(self, output: Any) -> torch.Tensor:
        # With DALI's dynamic executor the tensor owns its memory, so no copy is needed. When torch
        # deletes it, DALI keeps the memory until all work that the device had by then is done, on
        # whatever stream (class DLTensorGraveyard in DALI's dali/pipeline/data/dltensor.cc).
        images: torch.Tensor = torch.from_dlpack(output.as_tensor())
        # DALI's HWC layout is torch's channels_last, seen through permuted dimensions.
        return images.permute(0, 3, 1, 2) if self._channels_last else images

    def _stream(self) -> tuple[Any, ...]:
        return (torch.cuda.current_stream(self._device),) if self._gpu else ()

    def _start(self, requests: Iterator[Request]) -> _Iteration:
        iteration = _Iteration(requests, deque(maxlen=self._prefetch + 1))

        def feed() -> Inputs:
            """Return the inputs of the next batch; raises StopIteration at the end."""
            request = next(iteration.requests)
            inputs = self._inputs(request)
            iteration.under_way.append((request, inputs))
            return inputs

        iteration.pipeline = self._graph(feed, whole=True, **self._options)
        return iteration

    def _inputs(self, request: Request) -> Inputs:
        crop = request.crop
        room = crop.resized - request.image_size
        # Without a translation, the crop lies inside, and is placed by the fraction of the
        # remaining space before it.
        inside = (crop.corner / np.maximum(room, 1)).astype(np.float32)
        return (
            request.contents,
            crop.region[:, :2].astype(np.int32),
            crop.region[:, 2:].astype(np.int32),
            crop.resized[:, ::-1].astype(np.float32),
            crop.corner.astype(np.int32) if self._transform.translate else inside,
            crop.mirrored.astype(np.int32),
            np.full(len(request.contents), request.image_size, dtype=np.float32),
        )

    def _graph(self, feed: Callable[[], Inputs], *, whole: bool, **options: Any) -> Any:
        """Build a pipeline with inputs from ``feed``; it only decodes unless ``whole``."""
        from nvidia.dali import fn, pipeline_def, types

        how = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}
        interpolation = how[self._transform.interpolation]
        mean = [255 * value for value in self._transform.mean]
        std = [255 * value for value in self._transform.std]

        @pipeline_def(**options)  # type: ignore[untyped-decorator]
        def pipeline() -> Any:
            encoded, start, shape, *rest = fn.external_source(
                source=feed, num_outputs=7 if whole else 3, batch=True, no_copy=True
            )
            image = self._decoder(encoded, start=start, shape=shape, axis_names="WH")
            if not whole:
                return image
            resized, position, mirrored, size = rest
            image = fn.resize(image, size=resized, interp_type=interpolation, antialias=True)
            if self._transform.translate:
                image = fn.slice(
                    image,
                    start=position,
                    shape=fn.cast(fn.stack(size, size), dtype=types.INT32),
                    axis_names="WH",
                    out_of_bounds_policy="pad",
                    fill_values=0,
                )
                position = (0.0, 0.0)
            return fn.crop_mirror_normalize(
                image,
                crop_h=size,
                crop_w=size,
                crop_pos_x=position[0],
                crop_pos_y=position[1],
                mirror=mirrored,
                mean=mean,
                std=std,
                dtype=types.FLOAT16 if self._layout.dtype is torch.float16 else types.FLOAT,
                output_layout="HWC" if self._channels_last else "CHW",
            )

        built = pipeline()
        built.build()
        return built

    def _decoder(self, encoded: Any, **region: Any) -> Any:
        from nvidia.dali import fn, types

        hardware: dict[str, Any] = {}  # options of the GPU's JPEG decoders
        load = self._hw_decoder_load
        if self._gpu and is_hopper(self._device):
            hardware, load = {**_HOPPER_HINTS}, _HOPPER_LOAD if load is None else load
        if self._gpu and load is not None:
            hardware["hw_decoder_load"] = load
        return fn.decoders.image_slice(
            encoded,
            **region,
            # mixed: JPEG on the GPU's hardware decoder if it has one, other formats on the CPU
            device="mixed" if self._gpu else "cpu",
            output_type=types.RGB,
            adjust_orientation=False,
            # as CPU decoders do; the faster upsampling costs accuracy unless trained with
            jpeg_fancy_upsampling=True,
            **hardware,
        )

    def time_request(self, request: Request) -> tuple[float, float]:
        """Return the seconds that decoding and transforming a request take on one thread."""
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
        """Whether DALI can decode an image, tried in a pipeline of its own."""
        whole = [content], np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32)
        options = self._options | {"batch_size": 1, "prefetch_queue_depth": 1}
        alone = self._graph(lambda: whole, whole=False, **options)
        try:
            alone.run()
        except RuntimeError:
            return False
        return True
