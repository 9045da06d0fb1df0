"""Which trials are behind for good: those whose rate is not the higher one."""

import optuna
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

from largebatch.recipes.schema.load import load
from largebatch.recipes.tune.learning_rate.pruner import BehindHigherRates

RANGES = {"lr": FloatDistribution(0.01, 100), "warmup": FloatDistribution(0.0, 0.4)}
IMAGES = 5000
PRUNER = BehindHigherRates(IMAGES)
LAST = 8


def trial(lr, warmup, values, state=TrialState.RUNNING, last=None):
    """A trial with evaluations at steps 1, 2, ...; the last one of a finished trial is at 8."""
    known = dict(enumerate(values, start=1))
    if state is TrialState.COMPLETE:
        known[LAST] = last
    return optuna.trial.create_trial(
        state=state,
        params={"lr": lr, "warmup": warmup},
        distributions=RANGES,
        value=last,
        intermediate_values=known,
    )


def hopeless(direction, finished, running, images=IMAGES):
    study = optuna.create_study(direction=direction)
    study.add_trials([*finished, running])
    return BehindHigherRates(images).prune(study, study.trials[-1])


@pytest.mark.parametrize(("direction", "sign"), [("maximize", 1), ("minimize", -1)])
@pytest.mark.parametrize(
    ("lr", "warmup", "values", "behind"),
    [
        (1.0, 0.1, [20, 30, 40], True),  # behind the higher rate
        (2.0, 0.1, [20, 30, 40], True),  # behind the same rate
        (2.1, 0.0, [20, 30, 40], True),  # behind a higher rate: a longer warm-up, so it fell less
        (1.0, 0.1, [20, 30], False),  # once only
        (1.0, 0.1, [20, 30, 55], False),  # ahead of it again
        (1.0, 0.1, [50, 30, 40], False),  # ahead of it before: single evaluations may be off
        (1.0, 0.1, [20, 30, 49], False),  # behind, but perhaps by chance
        (3.0, 0.1, [10, 15, 20], False),  # behind, but with the higher rate
        (2.0, 0.2, [10, 15, 20], False),  # and with a longer warm-up
        (1.0, 0.1, [], False),
    ],
)
def test_a_trial_is_hopeless_if_it_is_behind_without_the_higher_rate(
    direction, sign, lr, warmup, values, behind
):
    theirs = [sign * value for value in (20, 40, 50)]
    finished = trial(2.0, 0.1, theirs, TrialState.COMPLETE, sign * 60)
    running = trial(lr, warmup, [sign * value for value in values])
    assert hopeless(direction, [finished], running) == behind


def test_fewer_images_ask_for_more():
    finished = trial(2.0, 0.1, [20, 40, 40], TrialState.COMPLETE, 60)
    running = trial(1.0, 0.1, [20, 35, 35])
    assert hopeless("maximize", [finished], running)
    assert not hopeless("maximize", [finished], running, images=200)


def test_trials_that_did_not_finish_are_no_measure():
    pruned = trial(2.0, 0.1, [20, 90, 90], TrialState.PRUNED)
    assert not hopeless("maximize", [pruned], trial(1.0, 0.1, [20, 30, 30]))


def test_trials_of_another_weight_decay_are_no_measure():
    def decayed(made, decay):
        return optuna.trial.create_trial(
            state=made.state,
            params={**made.params, "weight_decay": decay},
            distributions={**RANGES, "weight_decay": FloatDistribution(1e-6, 1.0)},
            value=made.value,
            intermediate_values=made.intermediate_values,
        )

    finished = trial(2.0, 0.1, [20, 40, 50], TrialState.COMPLETE, 60)
    running = decayed(trial(1.0, 0.1, [20, 30, 30]), 1e-4)
    assert hopeless("maximize", [decayed(finished, 1e-4)], running)
    assert not hopeless("maximize", [decayed(finished, 1e-3)], running)


def test_the_rate_is_that_of_the_recipes_schedule():
    assert PRUNER.rate({"lr": 2.0, "warmup": 0.25}, 0.25) == 2.0
    assert PRUNER.rate({"lr": 2.0, "momentum": 0.9, "warmup": 0.0}, 0.5) == pytest.approx(10)
    assert PRUNER.rate({"lr": 2.0, "trust_coefficient": 0.01}, 0.0) == pytest.approx(0.02)
    assert PRUNER.rate({"lr": 2.0, "warmup": 0.2, "power": 2.0}, 0.6) == pytest.approx(0.5)
    assert PRUNER.rate({"lr": 2.0, "warmup": 0.2}, 0.1) == pytest.approx(1.0)
    settings = {"lr": 1.0, "warmup": 0.2, "momentum": 0.5}
    for keys, expected in (
        ([], 2 * 0.5**2),  # digits decay by the power 2
        (["schedule.power=1"], 2 * 0.5),
        (["schedule.name=cosine"], 2 * 0.5**2),
        (["schedule.name=constant", "schedule.end=0"], 2.0),
        (["optimizer.name=muon"], 0.5**2),  # its steps do not grow with momentum
    ):
        recipe = load("digits", keys).recipe
        assert BehindHigherRates.of(recipe, 9).rate(settings, 0.6) == pytest.approx(expected), keys


@given(st.floats(0.01, 10), st.floats(0, 1), st.floats(0, 1), st.floats(0.5, 4))
@example(0.0625, 2.225073858507e-311, 2.225073858507e-311, 1.0)  # with fewer digits than others
def test_the_rate_is_at_most_its_peak(lr, warmup, part, power):
    settings = {"lr": lr, "warmup": warmup, "power": power}
    assert 0 <= PRUNER.rate(settings, part) <= lr * (1 + 1e-12)
    assert PRUNER.rate(settings, 1.0) == (lr if warmup == 1 else 0)
