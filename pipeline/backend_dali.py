"""Decoding and transforming with NVIDIA DALI, on the CPU or on the GPU, in the background.

DALI reads, decodes and resizes on its own threads (and stream) while the training step runs;
which images, and where they are cut, comes with each request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from .batch import Batch, Request, to_device
from .errors import DataError
from .geometry import Transform
from .sources import ImageFolder


class DaliBackend:
    """Turns requests into batches.

    Args:
        source: the images.
        transform: what is done to them.
        max_batch: the most images in a request.
        device: where batches are wanted.
        gpu: decode and transform on ``device`` rather than on the CPU.
        threads: of DALI's CPU pool.
        prefetch: batches made ahead of the one that was asked for.
    """

    def __init__(
        self,
        source: ImageFolder,
        transform: Transform,
        *,
        max_batch: int,
        device: torch.device,
        gpu: bool,
        threads: int,
        prefetch: int,
    ) -> None:
        self._source = source
        self._transform = transform
        self._device = device
        self._gpu = gpu
        self._options: dict[str, Any] = {
            "batch_size": max_batch,
            "num_threads": threads,
            "device_id": (device.index or 0) if gpu else None,
            "prefetch_queue_depth": prefetch,
        }
        self._pipeline: Any = None
        self._requests: Iterator[Request] = iter(())
        self._under_way: deque[Request] = deque()

    def __call__(self, requests: Iterator[Request]) -> Iterator[Batch]:
        """Yield the batch of each request, in order."""
        if self._pipeline is None or self._under_way:
            # An iteration that was given up leaves batches of its own in the pipeline.
            self._under_way.clear()
            self._pipeline = self._build()
        else:
            self._pipeline.reset()
        self._requests = requests
        while True:
            try:
                outputs = self._pipeline.run(*self._stream())
            except StopIteration:
                return
            except RuntimeError as error:
                for request in self._under_way:
                    self._source.check(request.indices)
                raise DataError(
                    f"DALI could not make a batch of {self._source.folder}: {error}"
                ) from error
            labels = torch.from_numpy(self._under_way.popleft().labels)
            # With DALI's dynamic executor the tensor owns its memory; nothing is copied.
            images = torch.from_dlpack(outputs[0].as_tensor())
            yield Batch(to_device(images, self._device), to_device(labels, self._device))

    def _stream(self) -> tuple[Any, ...]:
        return (torch.cuda.current_stream(self._device),) if self._gpu else ()

    def _feed(self) -> tuple[Any, ...]:
        """The inputs of the next batch; StopIteration when there is none."""
        request = next(self._requests)
        self._under_way.append(request)
        cut = request.cut
        room = cut.resized - self._transform.image_size
        return (
            [np.frombuffer(self._source.path(i).encode(), np.uint8) for i in request.indices],
            cut.region[:, :2].astype(np.int32),
            cut.region[:, 2:].astype(np.int32),
            cut.resized[:, ::-1].astype(np.float32),
            # DALI places crops by their share of the room there is
            (cut.corner / np.maximum(room, 1)).astype(np.float32),
            cut.mirrored.astype(np.int32),
        )

    def _build(self) -> Any:
        from nvidia.dali import fn, pipeline_def, types

        size = self._transform.image_size
        mean = [255 * value for value in self._transform.mean]
        std = [255 * value for value in self._transform.std]

        @pipeline_def(exec_dynamic=True, **self._options)  # type: ignore[untyped-decorator]
        def pipeline() -> Any:
            path, start, shape, resized, position, mirrored = fn.external_source(
                source=self._feed, num_outputs=6, batch=True
            )
            image = fn.decoders.image_slice(
                fn.io.file.read(path),
                start=start,
                shape=shape,
                axis_names="WH",
                device="mixed" if self._gpu else "cpu",
                output_type=types.RGB,
                adjust_orientation=False,
            )
            image = fn.resize(image, size=resized, interp_type=types.INTERP_LINEAR, antialias=True)
            return fn.crop_mirror_normalize(
                image,
                crop=(size, size),
                crop_pos_x=position[0],
                crop_pos_y=position[1],
                mirror=mirrored,
                mean=mean,
                std=std,
                dtype=types.FLOAT,
                output_layout="CHW",
            )

        built = pipeline()
        built.build()
        return built
