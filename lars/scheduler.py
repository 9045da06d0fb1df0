"""``as_scheduler``: the torch scheduler of a schedule, also for groups that are added later."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakMethod, WeakSet, ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .schedules import Schedule
from .state import plain


class _Scheduler(LRScheduler):
    """Sets each group's learning rate to ``schedule(step)`` times the group's own factor."""

    def __init__(
        self, optimizer: Optimizer, schedule: Schedule, last_step: int, base_lr: float | None
    ) -> None:
        self._schedule = schedule
        _unshare_rates(optimizer)
        for group in optimizer.param_groups:
            group["lr"] = plain(group["lr"])  # torch copies it into the state dict
        if last_step >= 0:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        rates = [_initial_lr(group) for group in optimizer.param_groups]
        default = float(optimizer.defaults.get("lr", 0.0))
        if base_lr is None:
            base_lr = default if default in rates and default > 0 else max(rates)
        self._base_lr = base_lr
        self._factors = [rate / base_lr if base_lr else 1.0 for rate in rates]
        # The factor of a group that is added without a rate.
        self._default_factor = default / base_lr if base_lr and default in rates else 1.0
        super().__init__(optimizer, last_step)
        _schedulers_of(optimizer).add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _schedulers_of(self.optimizer).add(self)  # whose optimizer is a copy too

    def take_in(self, lr: float, given: bool) -> None:
        """Set the factor of the last group, just added with its own rate (``given``) or not."""
        groups = self.optimizer.param_groups
        index, group = len(groups) - 1, groups[-1]
        self._take_in_unseen(index)
        level = self._level(index)
        if index == len(self._factors):  # else a loaded state has its factor
            default = float(self.optimizer.defaults.get("lr", 0.0))
            # Muon has rates of its own for some groups, in proportion to the optimizer's.
            share = lr / default if default else 1.0
            self._append_factor(self._factor(lr, level) if given else self._default_factor * share)
        now = lr if given and level else level * self._factors[index]
        now *= group.get("lr_scale", 1.0)
        rate = group["lr"]  # where it is a tensor, others may share it
        group["lr"] = rate.clone().fill_(now) if isinstance(rate, Tensor) else now
        self._last_lr = [*self._last_lr, now]

    def _take_in_unseen(self, end: int) -> None:
        """Set the factors of groups up to ``end`` that ``add_param_group`` has not told of."""
        for group in self.optimizer.param_groups[len(self._factors) : end]:
            self._append_factor(self._factor(float(group["lr"]), self._level(len(self._factors))))

    def _append_factor(self, factor: float) -> None:
        # For schedulers that are made later, such as one of a resumed run without its state.
        self.optimizer.param_groups[len(self._factors)]["initial_lr"] = factor * self._base_lr
        # A new list: the old one may be part of a state dict.
        self._factors = [*self._factors, factor]

    def _factor(self, lr: float, level: float) -> float:
        """Return the factor that keeps the ratio of ``lr`` to the other groups' rates."""
        if level:
            return lr / level
        # No rate has a ratio to 0: compare it with the rates that the groups were made with.
        return lr / self._base_lr if lr and self._base_lr else self._default_factor

    def _level(self, end: int) -> float:
        """Return the ``schedule(step)`` of the present rates, which something else may have set."""
        # Another scheduler of a sequence or the user may have set the present rates.
        shares = [
            (factor * group.get("lr_scale", 1.0), float(group["lr"]))
            for group, factor in zip(self.optimizer.param_groups[:end], self._factors, strict=False)
        ]
        shares = [(share, lr) for share, lr in shares if share > 0]
        if not shares:
            return float(self._schedule(self.last_epoch))
        share, lr = max((pair for pair in shares if pair[1] > 0), default=(1.0, 0.0))
        return lr / share

    def get_lr(self) -> list[float | Tensor]:
        groups = self.optimizer.param_groups
        self._take_in_unseen(len(groups))
        rate = float(self._schedule(self.last_epoch))  # a schedule may return a number of NumPy
        return [
            float(rate * factor * group.get("lr_scale", 1.0))
            for group, factor in zip(groups, self._factors, strict=False)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the schedule, which may be a function that cannot be pickled."""
        content = super().state_dict().items()
        return {key: plain(value) for key, value in content if key != "_schedule"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the step; also the rates, unless they have changed since the last step here."""
        groups = self.optimizer.param_groups
        own = [float(group["lr"]) for group in groups] == [float(lr) for lr in self._last_lr]
        made = self._factors
        super().load_state_dict(state_dict)
        self._factors = [*self._factors, *made[len(self._factors) :]]  # groups newer than the state
        if not own:  # they come from the loaded state of the optimizer
            return
        for group, lr in zip(groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def _unshare_rates(optimizer: Optimizer) -> None:
    """Give groups that share a tensor as their rate, but scale it differently, one of their own."""
    default = optimizer.defaults.get("lr")
    if isinstance(default, Tensor):
        optimizer.defaults["lr"] = default.clone()  # of the groups that are added later
    scales: dict[int, Any] = {}
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            scale = (group.get("lr_scale", 1.0), float(group.get("initial_lr", group["lr"])))
            if scales.setdefault(id(group["lr"]), scale) != scale:
                group["lr"] = group["lr"].clone()


def _initial_lr(group: dict[str, Any]) -> float:
    return float(group.get("initial_lr", group["lr"]))


def _schedulers_of(optimizer: Optimizer) -> WeakSet[_Scheduler]:
    """Return the schedulers that the optimizer tells of each group that is added to it."""
    add: Any = optimizer.add_param_group
    schedulers: WeakSet[_Scheduler] | None = getattr(add, "schedulers", None)
    if schedulers is not None:
        return schedulers
    known: WeakSet[_Scheduler] = WeakSet()
    # A strong reference would be a cycle, and keep the optimizer alive after its last use.
    method: Callable[[], Any] = WeakMethod(add) if inspect.ismethod(add) else lambda: add
    itself = ref(optimizer)

    @wraps(type(optimizer).add_param_group)
    def add_param_group(param_group: dict[str, Any]) -> None:
        given = isinstance(param_group, dict) and param_group.get("lr") is not None
        method()(param_group)
        group = itself().param_groups[-1]  # type: ignore[union-attr]
        lr = float(group["lr"]) if given else _initial_lr(group)
        for scheduler in known:
            scheduler.take_in(lr, given)

    add_param_group.schedulers = known  # type: ignore[attr-defined]
    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    return known


def as_scheduler(
    optimizer: Optimizer,
    schedule: Schedule,
    *,
    steps_done: int = 0,
    base_lr: float | None = None,
) -> LRScheduler:
    """Return a torch scheduler that sets the learning rate to ``schedule(step)``.

    Call its ``step()`` after each ``optimizer.step()``.

    An optimizer with one learning rate takes ``schedule(step)``, whatever rate it was made with.
    Where groups were made with different rates, the schedule is the rate of those with the
    optimizer's own ``lr`` (of those with the largest rate, if no group has it), and the others keep
    their ratio to it. A group's ``lr_scale``, as timm sets it for layer-wise decay, is one more
    factor.

    A group that is added while the scheduler runs keeps from then on the ratio of its rate to the
    other groups' rates, as with torch's multiplicative schedulers, so that an unfrozen layer may be
    added with a tenth of the current rate. Without a rate it takes the current one of the groups
    with the optimizer's own ``lr``, or ``schedule(step)`` if there are none. Where the other
    groups' rates are 0, as at the start of a warm-up, it is scaled like a group that was there from
    the start, and a rate of 0 like one without a rate.

    The state dict holds the step and the ratios, but not the schedule: make the scheduler with the
    same schedule again, then load the optimizer's state and the scheduler's.

    Args:
        optimizer: any torch optimizer.
        schedule: the schedule.
        steps_done: number of updates already made, to start in the middle of a run without a state
            dict. If the optimizer's state was loaded before, its groups hold their initial rates.
        base_lr: the rate that the schedule stands for: a group made with ``lr`` takes
            ``schedule(step) * lr / base_lr``.

    Raises:
        ValueError: ``base_lr`` is not above 0.

    Example with the two learning rates of Barlow Twins::

        groups = split_parameters(model, weight_decay=1e-6)
        for group in groups:
            group["lr"] = 0.2 if group["adapt"] else 0.0048
        optimizer = LARS.like("barlow-twins", groups, lr=0.2)
        scheduler = as_scheduler(optimizer, warmup(cosine(0.2, 9_000), 1_000))
    """
    if base_lr is not None and not base_lr > 0:  # written so that NaN fails too
        raise ValueError(f"base_lr must be above 0, not {base_lr}")
    return _Scheduler(optimizer, schedule, steps_done - 1, base_lr)
