"""Which trials are behind for good: those whose rate is not the higher one."""

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

from largebatch.recipes.tune.learning_rate.pruner import BehindHigherRates, pace

RANGE = {"lr": FloatDistribution(0.01, 100)}


def study(direction, *finished):
    """A study with finished trials, each given as its rate and its evaluations."""
    made = optuna.create_study(direction=direction, pruner=BehindHigherRates())
    for lr, values in finished:
        made.add_trial(
            optuna.trial.create_trial(
                params={"lr": lr},
                distributions=RANGE,
                value=values[-1],
                intermediate_values=dict(enumerate(values)),
            )
        )
    return made


@pytest.mark.parametrize(("direction", "sign"), [("maximize", 1), ("minimize", -1)])
@pytest.mark.parametrize(
    ("lr", "values", "hopeless"),
    [
        (1.0, [20, 30], True),  # behind the higher rate
        (2.0, [20, 30], True),  # behind the same rate
        (1.0, [20, 45], False),  # ahead of it
        (1.0, [50, 30], False),  # ahead of it before: one evaluation may be off
        (3.0, [10, 15], False),  # behind, but with the higher rate
        (1.0, [], False),
    ],
)
def test_a_trial_is_hopeless_if_it_is_behind_without_the_higher_rate(
    direction, sign, lr, values, hopeless
):
    made = study(direction, (2.0, [sign * 20, sign * 40, sign * 60]))
    running = optuna.trial.create_trial(
        state=TrialState.RUNNING,
        params={"lr": lr},
        distributions=RANGE,
        intermediate_values={step: sign * value for step, value in enumerate(values)},
    )
    made.add_trial(running)
    assert BehindHigherRates().prune(made, made.trials[-1]) == hopeless


def test_trials_that_did_not_finish_are_no_measure():
    made = study("maximize")
    made.add_trial(
        optuna.trial.create_trial(
            state=TrialState.PRUNED,
            params={"lr": 2.0},
            distributions=RANGE,
            intermediate_values={0: 90.0},
        )
    )
    running = made.ask(RANGE)
    running.report(10.0, 0)
    assert not running.should_prune()


def test_momentum_and_trust_coefficient_are_part_of_the_pace():
    assert pace({"lr": 2.0, "warmup": 0.3}) == 2.0
    assert pace({"lr": 2.0, "momentum": 0.9}) == pytest.approx(20)
    assert pace({"lr": 2.0, "trust_coefficient": 0.01}) == pytest.approx(0.02)
