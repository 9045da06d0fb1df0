"""Which trials of a search are hopeless beside those that finished."""

from __future__ import annotations

from collections.abc import Mapping

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState


class BehindHigherRates(optuna.pruners.BasePruner):
    """Prunes a trial that is behind a finished one of the same or a higher rate at the same step.

    A high learning rate is behind a low one for most of a run, and catches up while the rate falls.
    A trial with the lower rate that is behind already will therefore not come out ahead; one with
    the higher rate may. The best evaluation of a trial so far counts, as single ones vary.
    """

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether a trial is hopeless at its last evaluation."""
        step = trial.last_step
        if step is None:
            return False
        sign = 1 if study.direction is StudyDirection.MAXIMIZE else -1
        best = max(sign * value for value in trial.intermediate_values.values())
        return any(
            sign * other.intermediate_values[step] > best
            for other in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            if step in other.intermediate_values and pace(other.params) >= pace(trial.params)
        )


def pace(settings: Mapping[str, float]) -> float:
    """How fast weights move at the peak, up to a factor that all trials of a search share.

    Args:
        settings: Values by the name of a dimension. A constant gradient moves a weight by
            ``lr / (1 - momentum)`` per step, times the trust coefficient.
    """
    moves = settings["lr"] * settings.get("trust_coefficient", 1.0)
    return moves / (1 - settings.get("momentum", 0.0))
