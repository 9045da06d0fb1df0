"""Steps of LARS and Muon captured in a user's CUDA graph, against eager steps.

The graph holds forward pass, backward pass and the optimizer's step, with gradients that it
allocates in its own memory, as torch's notes on CUDA graphs say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.gpu.place import need_cuda
from largebatch.amp import Precision
from largebatch.lars import LARS, Muon, split_parameters
from largebatch.lars.muon.options import RULES

PRECISIONS = ("fp32", "bf16", "fp16-master")

#: Takes the model, the learning rate, and whether there are masters.
Make = Callable[[nn.Module, Tensor, bool], Optimizer]


def captured(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return what replays ``step``, captured after four eager steps that create its state."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class _Loop:
    """A small network and its training step, whose inputs keep their addresses."""

    def __init__(self, make: Make, precision: str, device: torch.device) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 8)
        self.precision = Precision(precision, device.type, loss_scale="none")
        self.model = self.precision.convert(nn.Sequential(*layers).to(device))
        self.rate = torch.full((), 0.5, device=device)
        self.optimizer: Any = make(self.model, self.rate, self.precision.form.masters)
        self.optimizer.found_inf = torch.zeros((), device=device)
        self.optimizer.grad_scale = torch.full((), 1024.0, device=device)
        self.x = torch.zeros(32, 64, device=device)

    def step(self) -> None:
        """Take one step with new gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.precision.forward():
            loss = self.model(self.x).float().square().mean()
        (loss * self.optimizer.grad_scale).backward()
        self.optimizer.step()

    def values(self) -> dict[str, Tensor]:
        state = self.optimizer.state
        named = self.model.named_parameters()
        return {name: state[p].get("master", p).detach().clone() for name, p in named}


def lars_is_eager(
    dialect: str, options: dict[str, Any], precision: str, device: torch.device
) -> None:
    """Check replays of a step with LARS, and the trust ratios after them."""

    def make(model: nn.Module, rate: Tensor, masters: bool) -> LARS:
        groups = split_parameters(model, 1e-3)
        return LARS(groups, rate, dialect=dialect, master_weights=masters, **options)

    eager, replayed = _replays_are_eager(make, precision, device)
    found = replayed.optimizer.trust_ratios()
    for name, ratio in eager.optimizer.trust_ratios().items():
        assert abs(found[name] - ratio) <= 1e-2 * abs(ratio), (name, found[name], ratio)


def muon_is_eager(device: torch.device) -> None:
    """Check replays of a step with Muon and each rule of its other parameters.

    In FP32, because in half precision another choice of kernels would show.
    """

    def make(model: nn.Module, rate: Tensor, masters: bool) -> Muon:
        hidden, *others = model.parameters()
        groups: list[dict[str, Any]] = [{"params": [hidden]}]
        for number, rule in enumerate(RULES):
            some = others[number :: len(RULES)]
            groups.append({"params": some, "orthogonal": False, "rule": rule})
        return Muon(groups, rate, ns_dtype=torch.float32)

    _replays_are_eager(make, "fp32", device)


def _replays_are_eager(make: Make, precision: str, device: torch.device) -> tuple[_Loop, _Loop]:
    """Check replays while inputs, learning rates and overflows change between them."""
    need_cuda(device)
    eager, replayed, start = (_Loop(make, precision, device) for _ in range(3))
    replay = captured(replayed.step, device)  # takes four steps before it captures
    for _ in range(4):
        eager.step()
    generator = torch.Generator().manual_seed(1)
    for number in range(5):
        x = torch.randn(32, 64, generator=generator).to(device)
        for loop in (eager, replayed):
            loop.x.copy_(x)
            loop.rate.fill_(0.5 / (number + 1))
            loop.optimizer.found_inf.fill_(float(number == 2))
        before = replayed.values()
        eager.step()
        replay()
        if number == 2:
            for name, value in replayed.values().items():
                assert torch.equal(value, before[name]), f"an overflow changed {name}"
    found = replayed.values()
    for name, value in eager.values().items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)
    begun = dict(start.model.named_parameters())
    assert not all(torch.equal(begun[name].float(), v.float()) for name, v in found.items())
    return eager, replayed
