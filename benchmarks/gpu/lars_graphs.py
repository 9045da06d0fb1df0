"""A LARS step captured in a CUDA graph, with forward and backward, against eager steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.gpu.place import need_cuda
from largebatch.amp import Precision
from largebatch.lars import LARS, split_parameters

LOSS_SCALE = 1024.0


class _Loop:
    """A small network and its training step, whose inputs keep their addresses for a CUDA graph."""

    def __init__(
        self, dialect: str, options: dict[str, Any], precision: str, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 8)
        self.precision = Precision(precision, device.type, loss_scale="none")
        self.model = self.precision.convert(nn.Sequential(*layers).to(device))
        self.rate = torch.full((), 0.5, device=device)
        masters = self.precision.form.masters
        groups = split_parameters(self.model, 1e-3)
        self.optimizer = LARS(groups, self.rate, dialect=dialect, master_weights=masters, **options)
        self.overflow = torch.zeros((), device=device)
        self.scale = torch.full((), LOSS_SCALE, device=device)
        self.optimizer.grad_scale = self.scale  # type: ignore[attr-defined]
        self.optimizer.found_inf = self.overflow  # type: ignore[attr-defined]
        self.x = torch.zeros(32, 64, device=device)

    def step(self) -> None:
        """Take one step with new gradients, which a CUDA graph allocates in its own memory."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.precision.forward():
            loss = self.model(self.x).float().square().mean()
        (loss * self.scale).backward()
        self.optimizer.step()

    def values(self) -> dict[str, Any]:
        state = self.optimizer.state
        named = self.model.named_parameters()
        return {name: state[p].get("master", p).detach().clone() for name, p in named}


def graph_is_eager(
    dialect: str, options: dict[str, Any], precision: str, device: torch.device
) -> None:
    """Check replays of a captured step against eager steps.

    Inputs, learning rates and overflows change between replays. Capture follows torch's notes on
    CUDA graphs: warm-up on a side stream, and gradients allocated by the graph.
    """
    need_cuda(device)
    loops = [_Loop(dialect, options, precision, device) for _ in range(2)]
    eager, captured = loops
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(32, 64, generator=generator).to(device) for _ in range(8)]

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for x in inputs[:3]:
            captured.x.copy_(x)
            captured.step()
    torch.cuda.current_stream(device).wait_stream(side)
    for x in inputs[:3]:
        eager.x.copy_(x)
        eager.step()

    graph = torch.cuda.CUDAGraph()
    captured.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        captured.step()
    for number, x in enumerate(inputs[3:]):
        for loop in loops:
            loop.x.copy_(x)
            loop.rate.fill_(0.5 / (number + 1))
            loop.overflow.fill_(float(number == 2))
        before = captured.values()
        eager.step()
        graph.replay()
        if number == 2:
            for name, value in captured.values().items():
                assert torch.equal(value, before[name]), f"an overflow changed {name}"
    found, expected = captured.values(), eager.values()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)
    start = _Loop(dialect, options, precision, device).values()
    assert not all(torch.equal(start[name].float(), v.float()) for name, v in found.items())
    a, b = (loop.optimizer.trust_ratios() for loop in loops)
    for name, ratio in a.items():
        assert abs(b[name] - ratio) <= 1e-2 * abs(ratio), (name, b[name], ratio)
