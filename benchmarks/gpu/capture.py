"""Capture a step in a CUDA graph, as torch's notes on CUDA graphs say."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return what replays ``step``, captured after eager steps that create its state.

    A step that trains must set its gradients to None at its start, so that the graph allocates
    them in its own memory.
    """
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(kept: Callable[[], object] = step) -> None:
        # The graph does not keep the tensors alive that it uses; the step does.
        graph.replay()

    return replay
