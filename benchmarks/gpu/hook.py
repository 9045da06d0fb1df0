"""The all-reduce hook on every back end of the machine: its gradients, and what backward hides.

Gradients are whole numbers whose sums and means are exact in BF16, so that they must be equal to
those of DDP without a hook. Each collective starts after a random delay on its stream, and each
bucket has more chunks than an all-reduce has phases, so that streams that do not wait for one
another show. For the overlap, a slow collective stands in for the network: it occupies its stream
for a given time and then doubles its input, so that gradients read too early are detected.

One GPU allows these ways: ``gloo`` with CUDA tensors, which exercises streams and futures; several
ranks by NCCL from 2.30 on; and one rank, in groups that :class:`Topology` leaves out otherwise.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu import clock
from benchmarks.gpu.place import Place
from benchmarks.gpu.ranks import backends, on_ranks
from benchmarks.gpu.report import FAILED, LATE, OK, WRONG, Report, error_line
from largebatch.comm import (
    ALGORITHMS,
    Grid,
    Groups,
    Plan,
    Rule,
    Topology,
    Traffic,
    collectives,
    register,
)

TITLE = "All-reduce hook"

SLOW = "slow"
#: Layers of the network whose backward pass hides slow collectives; the least share of them that it
#: must hide on NCCL.
_LAYERS, LEAST_HIDDEN = 8, 50.0
_CHUNKS = 12
#: A way that has not ended after so many seconds hangs.
LIMIT_SECONDS = 90.0
#: Algorithms that send messages from rank to rank on gloo, which it does not do on CUDA.
_POINT_TO_POINT = ("leader", "halving-doubling", "parameter-server")

Tell = Callable[[str, Any], None]


def run(report: Report, place: Place) -> None:
    """Check the gradients and measure the overlap, back end by back end."""
    ways = [(backend, 1) for backend in backends(place.device)]
    ways += [(backend, 4) for backend in backends(place.device) if place.on_gpu]
    ways += [("gloo", 4 if place.on_gpu else 2)]
    for number, (backend, ranks) in enumerate(ways):
        seconds = min(LIMIT_SECONDS, report.seconds_left / (len(ways) - number))
        what = f"{backend}, {ranks} {'rank' if ranks == 1 else 'ranks'}"
        version = torch.cuda.nccl.version() if place.on_gpu else ()
        if backend != "gloo" and ranks > 1 and version < (2, 30):
            shown = ".".join(map(str, version))
            report.skip(what, f"NCCL {shown} refuses several ranks on one GPU; 2.30 allows it")
        elif report.has_time(what, 0 if place.dry else 15):
            measure(report, place, backend, ranks, seconds)


def measure(report: Report, place: Place, backend: str, ranks: int, seconds: float) -> None:
    """Record the outcome of every case of a way; with one rank, also the overlap."""
    rules = rules_of(backend, ranks, place.device, _bucket_bytes(place.dry))
    found, problems = on_ranks(
        ranks, _work, rules, place, backend=backend, device=place.device, seconds=seconds
    )
    late = all(problem.endswith("no more time") for problem in problems) and seconds < LIMIT_SECONDS
    for name in rules:
        errors = [f"rank {i}: {of[name]}" for i, of in enumerate(found) if of.get(name)]
        if errors:
            state = WRONG if "AssertionError" in errors[0] else FAILED
        else:
            done = all(name in of_rank for of_rank in found)
            state = OK if done else LATE if late else FAILED
            errors = [""] if done else [*problems, "a rank has not told"]
        what = f"gradients are those of DDP: {backend}, {ranks}, {name}"
        report.record(what, state, errors[0])
    overlap = found[0].get("overlap")
    if overlap:
        report.row("what backward hides of slow collectives", backend=backend, **overlap)
        if backend != "gloo":
            what = f"slow collectives that backward hides, percent, {backend}"
            report.goal(what, overlap["hidden_percent"], least=LEAST_HIDDEN)


def rules_of(backend: str, ranks: int, device: torch.device, bucket_bytes: int) -> dict[str, Rule]:
    """Return the rules to check: every algorithm, in chunks if it has phases, in every dtype."""
    left_out = _POINT_TO_POINT if (backend, device.type) == ("gloo", "cuda") else ()
    rules = {}
    for wire in (None, "bf16", "fp16"):
        chunk = bucket_bytes // _CHUNKS // (2 if wire else 1)
        of_dtype = f", {wire}" if wire else ""
        for name in (name for name in ALGORITHMS if name not in left_out):
            rules[name + of_dtype] = Rule(name, wire_dtype=wire)
            if name not in ("hierarchical", "leader", "torus"):
                continue
            # The torus of one column sends nothing in the first of its phases.
            shape = (1, ranks) if name == "torus" else None
            rules[f"{name}{of_dtype}, in chunks"] = Rule(name, None, wire, chunk, shape)
            if wire and name != "leader":
                summed = Rule(name, None, wire, chunk, shape, sum_dtype="fp32")
                rules[f"{name}{of_dtype} summed in fp32, in chunks"] = summed
    return rules


def _work(tell: Tell, rules: dict[str, Rule], place: Place) -> None:
    """Check all rules as one rank, and tell the error of each as soon as it is known."""
    ranks = dist.get_world_size()
    with groups_of_one_rank() if ranks == 1 else nullcontext():
        for name, rule in rules.items():
            error = ""
            try:
                equal_those_of_ddp(rule, place.device, place.dry)
            except Exception as raised:
                error = error_line(raised)
            tell(name, error)
            if error and not error.startswith("AssertionError"):
                raise SystemExit(1)  # a collective failed, and the other ranks may wait in it
    if ranks == 1:
        tell("overlap", overlap(place))


class Products(nn.Module):
    """Gradients are equal to the input: layer by layer, they are multiplied and added."""

    def __init__(self, layers: int, elements: int) -> None:
        super().__init__()
        # Lengths that chunks and ranks do not divide.
        self.weights = nn.ParameterList(torch.ones(elements + 7 * i) for i in range(layers))

    def forward(self, inputs: list[Tensor]) -> Tensor:
        products = [(w * x).sum() for w, x in zip(self.weights, inputs, strict=True)]
        return torch.stack(products).sum()


@contextmanager
def groups_of_one_rank() -> Iterator[None]:
    """Make process groups of a single rank, for which Groups has None, inside the block."""
    world, first, second = (dist.new_group([0]) for _ in range(3))
    with (
        mock.patch.multiple(Groups, world=world, intra=first, inter=second),
        mock.patch.object(Topology, "grid", return_value=Grid(first, second)),
    ):
        yield


@contextmanager
def delayed_collectives(device: torch.device, seed: int) -> Iterator[None]:
    """Start every collective of a phase after a random delay on the current stream."""
    rng = random.Random(seed)

    def delay(call: Any) -> Any:
        def later(*arguments: Any) -> Any:
            torch.cuda._sleep(rng.choice((0, 0, 20_000, 200_000)))  # up to 0.1 ms
            return call(*arguments)

        return later

    names = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")
    changed = {name: delay(getattr(collectives, name)) for name in names}
    with mock.patch.multiple(collectives, **changed) if device.type == "cuda" else nullcontext():
        yield


def equal_those_of_ddp(rule: Rule, device: torch.device, dry: bool) -> None:
    """Check that the hook averages as DDP does, on this rank; an error has step and layer."""
    layers, elements, steps = (4, 2_000, 2) if dry else (8, 500_000, 20)
    ranks = dist.get_world_size()
    if ranks > 1 and not dry:
        steps = 5  # processes take turns on a GPU, so that each collective takes milliseconds
    plan = Plan((rule,), fusion_threshold_bytes=_bucket_bytes(dry))
    plain, hooked = (
        DistributedDataParallel(Products(layers, elements).to(device), **plan.ddp_options())
        for _ in range(2)
    )
    register(hooked, plan, Topology.from_environment(max(1, ranks // 2)))
    for step in range(steps):
        inputs = _inputs(step, plain, device)
        expected = _gradients(plain, inputs)
        with delayed_collectives(device, step):
            found = _gradients(hooked, inputs)
        for layer, (a, b) in enumerate(zip(expected, found, strict=True)):
            if not torch.equal(a, b):
                wrong = int((a != b).sum())
                raise AssertionError(f"step {step}, layer {layer}: {wrong} of {a.numel()} differ")


def _bucket_bytes(dry: bool) -> int:
    return 4 * (4_000 if dry else 1_000_000)


def _inputs(step: int, model: nn.Module, device: torch.device) -> list[Tensor]:
    """Return whole numbers, other ones for each rank and step, up to 36, multiples of 12."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return [
        (12 * torch.randint(-3, 4, weight.shape, generator=generator)).float().to(device)
        for weight in model.parameters()
    ]


def _gradients(model: nn.Module, inputs: Any) -> list[Tensor]:
    """Run a step; the gradients are read on the current stream right after backward."""
    model.zero_grad()
    model(inputs).backward()
    return [p.grad * 1 for p in model.parameters() if p.grad is not None]


class _MeanSquare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class SlowAllReduce:
    """An all-reduce that takes ``seconds`` and doubles its input; it counts its calls."""

    name = SLOW

    def __init__(self, seconds: float) -> None:
        self.seconds, self.calls = seconds, 0

    def check(self, topology: Topology) -> None:
        """Accept every topology."""

    def all_reduce(self, tensor: Tensor, topology: Topology) -> None:
        self.calls += 1
        clock.sleep(self.seconds, tensor.device) if tensor.is_cuda else time.sleep(self.seconds)
        dist.all_reduce(tensor)
        tensor.mul_(2)

    def traffic(self, size_bytes: int, topology: Topology) -> Traffic:
        return Traffic(0, 0.0, 1, float(size_bytes))


def overlap(place: Place) -> dict[str, float]:
    """Measure, on one rank, the part of slow collectives that backward hides."""
    width, batch = (64, 256) if place.dry else (4096, 4096)
    torch.manual_seed(0)
    layers = [module for _ in range(_LAYERS) for module in (nn.Linear(width, width), nn.Tanh())]
    plain = nn.Sequential(*layers, _MeanSquare()).to(place.device)
    x = torch.randn(batch, width, device=place.device)

    def seconds_of(model: nn.Module) -> float:
        step = partial(_gradients, model, x)
        clock.seconds(step, place.device, 3)
        return statistics.median(clock.seconds(step, place.device) for _ in range(5))

    alone = seconds_of(plain)
    slow: Any = SlowAllReduce(max(0.5 * alone / _LAYERS, 1e-3))
    with mock.patch.dict(ALGORITHMS, {SLOW: slow}):
        bucket_mb = 4 * width * width / 2**20  # one layer per bucket
        model = DistributedDataParallel(copy.deepcopy(plain), bucket_cap_mb=bucket_mb)
        register(model, Plan.single(SLOW), Topology.from_environment())
        for a, b in zip(_gradients(plain, x), _gradients(model, x), strict=True):
            torch.testing.assert_close(2 * a, b, rtol=1e-4, atol=1e-7)
        slow.calls = 0
        both = seconds_of(model)
    slept = slow.seconds * slow.calls / 8  # steps
    times = {"forward_and_backward_ms": alone, "collectives_ms": slept, "both_ms": both}
    hidden = {"hidden_percent": 100 * (alone + slept - both) / slept}
    return {name: 1e3 * seconds for name, seconds in times.items()} | hidden
