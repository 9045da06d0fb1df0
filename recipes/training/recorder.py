"""Recording work on a GPU into CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Recorder(Protocol):
    """Captures work on a device into graphs, and replays them."""

    def warm_up(self, run: Callable[[], T]) -> T:
        """Run what will be captured, in the way in which it will be captured."""

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Capture what ``run`` does, without doing it.

        Returns:
            What ``run`` returned, whose tensors have no content yet, and a function that replays
            the work, which fills them.
        """


class DeviceGraphs:
    """Captures CUDA graphs that share a memory pool, and are replayed in the order of capture.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Not the default stream, which cannot be captured, nor wait for one that is.
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], T]) -> T:
        """Run on the stream of the capture: autograd and cuBLAS keep what they make per stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = run()
        current.wait_stream(self._stream)
        return result

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Capture a graph; see :class:`Recorder`."""
        graph = torch.cuda.CUDAGraph()
        # "thread_local": the threads of the input allocate, pin and copy meanwhile. In the mode
        # "global" such a call in any thread would end the capture with an error; here only calls
        # of this thread do, which nothing but the step makes. "relaxed" would not report those.
        # (cudaStreamCaptureMode in NVIDIA's CUDA Runtime API)
        try:
            with (
                torch.cuda.stream(
                    self._stream
                ),  # which torch.cuda.graph leaves only if it succeeds
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                result = run()
        except BaseException:
            # torch 2.11 leaves the pool open where a capture ends with an error: memory that other
            # streams have used would never be given out again.
            graph.reset()
            with suppress(RuntimeError):  # it is closed
                torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
            raise
        return result, graph.replay


#: What records graphs, by the type of a device.
RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": DeviceGraphs}
