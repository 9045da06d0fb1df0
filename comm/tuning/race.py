"""The race that ends tuning: the best plans against each other, as training would use them.

Rules are chosen from single all-reduces of single messages, on ranks that do nothing else, and the
bucket size by a simulation. Neither knows how a plan fares beside the backward pass, which takes
the processors that gloo copies with, or when buckets follow each other without a pause. So the
plans predicted to be best run whole backward passes: the device computes for as long as the
model's backward takes, while the communication hook reduces its buckets.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..hook import PlanState
from ..launch_order import device_of_messages
from ..model.profile import Gradient, Profile
from ..model.simulate import Cluster, best_threshold, buckets, simulate
from ..plan import Plan, Rule
from ..topology import Topology

#: Plans that take part, beside DDP's default.
FINALISTS = 3

#: Plans whose times differ by at most this fraction are equally fast for any purpose.
EQUAL_WITHIN = 0.02

_LEAST_ROUNDS = 3  # before a plan is dropped, or one other than the favourite wins
_MOST_ROUNDS = 12
_FAR_BEHIND = 1.1  # times the fastest: dropped
_LONGEST_BACKWARD = 2.0  # times the predicted communication; longer ones are shortened to that
_SIDE = 192  # of the matrices that are multiplied in place of the model's backward
_WARM_UP_SECONDS = 0.2
_MARGIN = 1.1  # factor on the predicted time of the next round


@dataclass(frozen=True)
class Finalist:
    """A plan in the race, and the time of backward on the slowest rank in each of its rounds."""

    plan: Plan
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Final:
    """The result of the race."""

    finalists: tuple[Finalist, ...]  #: From the simplest plan on.
    winner: int  #: Its index among them.
    backward_seconds: float  #: Of backward without any all-reduce.

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Final:
        """Read a result from what ``asdict`` made of it."""
        found = [Finalist(Plan.of(f["plan"]), tuple(f["seconds"])) for f in content["finalists"]]
        return cls(tuple(found), content["winner"], content["backward_seconds"])

    @property
    def plan(self) -> Plan:
        """The plan that has won."""
        return self.finalists[self.winner].plan

    @property
    def decided(self) -> bool:
        """Whether there were enough rounds to choose by their times."""
        return len(self.finalists[self.winner].seconds) >= _LEAST_ROUNDS

    @property
    def fastest(self) -> int:
        """Index of the plan with the least median time, of those that ran in every round."""
        seconds = [finalist.seconds for finalist in self.finalists]
        rounds = max(map(len, seconds))
        stayed = [index for index, times in enumerate(seconds) if len(times) == rounds]
        return min(stayed, key=lambda index: _typical(seconds[index]))

    def ratios(self, index: int) -> tuple[float, ...]:
        """Times of a plan relative to :attr:`fastest`, in each round that it took part in."""
        # Those of a round share the machine's disturbances.
        fastest = self.finalists[self.fastest].seconds
        return tuple(a / b for a, b in zip(self.finalists[index].seconds, fastest, strict=False))


def finalists(
    chosen: Plan, rules: Sequence[Rule], profile: Profile, cluster: Cluster
) -> tuple[Plan, ...]:
    """Return the plans to race, from the simplest on: DDP's default and the best by prediction."""
    single = [Plan((rule,), best_threshold(profile, cluster, (rule,))) for rule in rules]
    ranked = sorted(single, key=lambda plan: simulate(profile, cluster, plan).step_seconds)
    default = Plan.single()
    best = [plan for plan in dict.fromkeys([chosen, *ranked]) if plan != default][:FINALISTS]
    return (default, *sorted(best, key=_complexity))


def _complexity(plan: Plan) -> tuple[int, ...]:
    return (
        len(plan.rules),
        sum(rule.wire_dtype is not None for rule in plan.rules),
        sum(rule.chunk_bytes is not None for rule in plan.rules),
        sum(rule.algorithm != "ring" for rule in plan.rules),
    )


def race(
    plans: Sequence[Plan],
    favourite: Plan,
    topology: Topology,
    profile: Profile,
    *,
    budget_seconds: float,
    backward_seconds: float,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[str], None] = lambda line: None,
) -> Final:
    """Race ``plans``, from the simplest on, on the running job; every rank gets the same result."""
    # Plans take turns in each round. The winner is the simplest plan whose median ratio to the
    # fastest is within EQUAL_WITHIN; with too few rounds it is the favourite.
    start = time.monotonic()
    track = _Track(topology, profile, backward_seconds, dtype)
    for plan in plans:
        track.lap(plan, warm_up=True)
    times: list[list[float]] = [[] for _ in plans]
    active, winner = list(range(len(plans))), plans.index(favourite)

    def result() -> Final:
        found = (Finalist(plan, tuple(t)) for plan, t in zip(plans, times, strict=True))
        return Final(tuple(found), winner, backward_seconds)

    for done in range(_MOST_ROUNDS):
        left = budget_seconds - track.slowest(time.monotonic() - start)
        if left <= sum(_typical(times[index]) for index in active) * _MARGIN:
            break
        first = done % len(active)
        for index in active[first:] + active[:first]:
            times[index].append(track.lap(plans[index]))
        if done + 1 < _LEAST_ROUNDS:
            continue
        so_far = result()
        ratios = {index: statistics.median(so_far.ratios(index)) for index in active}
        winner = min(index for index in active if ratios[index] <= 1 + EQUAL_WITHIN)
        active = [index for index in active if ratios[index] <= _FAR_BEHIND]
        if topology.rank == 0:
            progress(f"race: {done + 1} rounds, {len(active)} of {len(plans)} plans left")
    return result()


def _typical(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) if seconds else 0.0


def _bucket(number: int, gradients: Tensor) -> Any:
    """Return what the hook reads of a bucket of DDP."""
    return SimpleNamespace(index=lambda: number, buffer=lambda: gradients, parameters=list)


class _Track:
    """Backward passes of computation and all-reduces, timed."""

    def __init__(
        self, topology: Topology, profile: Profile, backward_seconds: float, dtype: torch.dtype
    ) -> None:
        self._topology, self._profile = topology, profile
        self._states: dict[Plan, PlanState] = {}
        self._device = device_of_messages()
        elements = profile.size_bytes // dtype.itemsize
        # Zeros do not overflow, however often they are summed.
        self._gradients = torch.zeros(elements, dtype=dtype, device=self._device)
        self._matrix = torch.zeros(_SIDE, _SIDE, device=self._device)
        self._product = torch.zeros_like(self._matrix)
        self._scale = backward_seconds / profile.backward_seconds
        self._per_second = self._products_per_second()

    def lap(self, plan: Plan, *, warm_up: bool = False) -> float:
        """Time backward on the slowest rank; to warm up, only the largest bucket is reduced."""
        fused = buckets(self._profile.gradients, plan)
        ends = [(bucket[-1].ready_seconds, sum(g.size_bytes for g in bucket)) for bucket in fused]
        if warm_up:
            ends = [(0.0, max(size for _, size in ends))]
        state = self._states.setdefault(plan, PlanState(plan, self._topology))
        state.connect()
        dist.barrier()
        start, now, offset = time.perf_counter(), 0.0, 0
        futures = []
        for index, (ready, size) in enumerate(ends):
            self._compute((ready - now) * self._scale)
            length = size // self._gradients.element_size()
            part = self._gradients[offset : offset + length]
            futures.append(state.reduce(_bucket(index, part)))
            now, offset = ready, offset + length
        if not warm_up:
            self._compute((self._profile.backward_seconds - now) * self._scale)
        for future in futures:
            future.wait()
        if self._gradients.is_cuda:
            torch.cuda.synchronize(self._device)
        return self.slowest(time.perf_counter() - start)

    def slowest(self, seconds: float) -> float:
        """Return the largest value of any rank."""
        largest = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    def _compute(self, seconds: float) -> None:
        """Do the work that takes ``seconds`` on a rank if nothing is sent."""
        for _ in range(round(seconds * self._per_second)):
            torch.mm(self._matrix, self._matrix, out=self._product)

    def _products_per_second(self) -> float:
        """Measure the rate of computation while all ranks compute; the slowest rank's counts."""
        count, took = 8, 0.0
        while took < _WARM_UP_SECONDS:
            count *= 2
            dist.barrier()
            start = time.perf_counter()
            for _ in range(count):
                torch.mm(self._matrix, self._matrix, out=self._product)
            if self._gradients.is_cuda:
                torch.cuda.synchronize(self._device)
            took = self.slowest(time.perf_counter() - start)
        return count / took


def backward_for(profile: Profile, cluster: Cluster, plan: Plan) -> float:
    """Return the length of backward in the race: the model's, but not much over communication."""
    communication = simulate(profile, cluster, plan).communication_seconds
    return min(profile.backward_seconds, _LONGEST_BACKWARD * communication)


def plain_profile(size_bytes: int, backward_seconds: float, element_bytes: int = 4) -> Profile:
    """Return a profile for tuning without a model: equal gradients, ready at equal intervals."""
    count = max(1, size_bytes // 2**20)
    gradients = tuple(
        Gradient(str(i), 2**20, backward_seconds * (i + 1) / count) for i in range(count)
    )
    return Profile(gradients, 0.0, backward_seconds, element_bytes)
