"""Which trials of a search are hopeless beside those that finished."""

from __future__ import annotations

import math
from collections.abc import Mapping

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from ...schema.optimizers import entry_of
from ...schema.recipe import Recipe

#: How far a trial has to be behind: standard errors of a difference in accuracy on the held-out
#: images, and for losses a share of the loss.
ERRORS, SHARE = 2.0, 0.05


class BehindHigherRates(optuna.pruners.BasePruner):
    """Prunes a trial that is behind a finished one whose learning rate was as high at that step.

    A trial with the higher rate is behind for most of a run, and catches up while the rate falls;
    so does one with the longer warm-up, whose rate falls later. A trial whose rate is not higher at
    the moment and that is behind is not expected to come out ahead. It has to be behind by more
    than held-out images differ by chance, at two evaluations in a row, with the best of its own so
    far, as single ones vary. Trials of different weight decays are not compared, as weight decay
    too decides how fast a run settles.

    Args:
        images: Number of held-out images that score the trials.
        power: Power by which the rate decays where trials do not vary it.
        averages: Whether momentum adds up gradients, so that it multiplies the rate.
    """

    def __init__(self, images: int, power: float = 1.0, averages: bool = True) -> None:
        self._images, self._power, self._averages = images, power, averages

    @classmethod
    def of(cls, recipe: Recipe, images: int) -> BehindHigherRates:
        """The pruner for trials of a recipe."""
        schedule = recipe.schedule
        powers = {"polynomial": schedule.power, "cosine": 2.0}  # others do not fall gradually
        averages = not entry_of(recipe.optimizer.name).orthogonalizes
        return cls(images, powers.get(schedule.name, 0.0), averages)

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether a trial is hopeless at its last evaluation."""
        steps = sorted(trial.intermediate_values)
        if len(steps) < 2:
            return False
        accuracy = study.direction is StudyDirection.MAXIMIZE
        return any(
            other.params.get("weight_decay") == trial.params.get("weight_decay")
            and all(self._is_behind(trial, other, step, accuracy) for step in steps[-2:])
            for other in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        )

    def _is_behind(self, trial: FrozenTrial, other: FrozenTrial, step: int, accuracy: bool) -> bool:
        value, end = other.intermediate_values.get(step), other.last_step
        if value is None or end is None:
            return False
        part, sign = step / end, 1 if accuracy else -1
        so_far = (sign * v for s, v in trial.intermediate_values.items() if s <= step)
        higher = self.rate(other.params, part) >= self.rate(trial.params, part)
        return higher and sign * value - max(so_far) > self._margin(value, accuracy)

    def rate(self, settings: Mapping[str, float], part: float) -> float:
        """How fast weights move at some part of a run, up to a factor that all trials share.

        A constant gradient moves a weight by ``lr / (1 - momentum)`` per step, times the trust
        coefficient. The rate rises during the warm-up, and falls after it by a power of what is
        left.

        Args:
            settings: Values by the name of a dimension.
            part: Part of the run, from 0 to 1.
        """
        peak, warmup = self.peak(settings), settings.get("warmup", 0.0)
        if part <= warmup:
            return peak * (part / warmup) if warmup else peak
        power = settings.get("power", self._power)
        return float(peak * ((1 - part) / (1 - warmup)) ** power)

    def peak(self, settings: Mapping[str, float]) -> float:
        """The highest value of :meth:`rate`."""
        peak = settings["lr"] * settings.get("trust_coefficient", 1.0)
        return peak / (1 - settings.get("momentum", 0.0)) if self._averages else peak

    def _margin(self, value: float, accuracy: bool) -> float:
        if not accuracy:
            return SHARE * abs(value)
        p = value / 100
        return 100 * ERRORS * math.sqrt(2 * p * (1 - p) / self._images)
