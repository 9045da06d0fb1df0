"""Which trials of a search are hopeless beside those that finished."""

from __future__ import annotations

import math
from collections.abc import Mapping

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

#: How far a trial has to be behind: standard errors of a difference in accuracy, and for losses a
#: share of the loss.
ERRORS, SHARE = 2.0, 0.05


class BehindHigherRates(optuna.pruners.BasePruner):
    """Prunes a trial that is behind a finished one whose learning rate was as high at that step.

    A trial with the higher rate is behind for most of a run, and catches up while the rate falls;
    so does one with the longer warm-up, whose rate falls later. A trial whose rate is not higher at
    the moment and that is behind will therefore not come out ahead. It has to be behind by more
    than chance. Its best evaluation so far counts, as single ones vary.

    Args:
        images: Number of held-out images that score the trials.
    """

    def __init__(self, images: int) -> None:
        self._images = images

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether a trial is hopeless at its last evaluation."""
        step = trial.last_step
        if step is None:
            return False
        accuracy = study.direction is StudyDirection.MAXIMIZE
        sign = 1 if accuracy else -1
        best = max(sign * value for value in trial.intermediate_values.values())
        for other in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            value, end = other.intermediate_values.get(step), other.last_step
            if value is None or end is None:
                continue
            part, margin = step / end, self._margin(value, accuracy)
            higher = rate(other.params, part) >= rate(trial.params, part)
            if higher and sign * value - best > margin:
                return True
        return False

    def _margin(self, value: float, accuracy: bool) -> float:
        if not accuracy:
            return SHARE * abs(value)
        p = value / 100
        return 100 * ERRORS * math.sqrt(2 * p * (1 - p) / self._images)


def rate(settings: Mapping[str, float], part: float) -> float:
    """How fast weights move at some part of a run, up to a factor that a search's trials share.

    A constant gradient moves a weight by ``lr / (1 - momentum)`` per step, times the trust
    coefficient. The rate rises during the warm-up, and falls after it, by a power of what is left.

    Args:
        settings: Values by the name of a dimension. The power of the decay is 1 if it is not one.
        part: Part of the run, from 0 to 1.
    """
    peak = settings["lr"] * settings.get("trust_coefficient", 1.0)
    peak /= 1 - settings.get("momentum", 0.0)
    warmup = settings.get("warmup", 0.0)
    if part < warmup:
        return peak * part / warmup
    return float(peak * ((1 - part) / (1 - warmup)) ** settings.get("power", 1.0))
