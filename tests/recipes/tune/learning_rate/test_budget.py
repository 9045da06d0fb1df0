"""Lengths of trials are fitted to the budget, or the smallest one is named."""

import re

from hypothesis import given
from hypothesis import strategies as st

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.tune.learning_rate.budget import (
    FEWEST,
    MOST,
    UPDATES,
    Cost,
    holds_coarse,
    plan,
)


@given(
    start=st.floats(0, 100),
    whole=st.floats(1, 1e6),
    budget=st.floats(1, 1e7),
    steps=st.integers(2, 10**6),
    early=st.floats(0.3, 1.0),
)
def test_the_trials_that_are_planned_fit_and_a_larger_budget_has_longer_fine_ones(
    start, whole, budget, steps, early
):
    cost = Cost(start, whole, "seconds")
    try:
        planned = plan(budget, cost, steps)
    except RecipeError as error:
        least = float(re.search(r"at least ([\d.e+]+)", str(error))[1])
        assert budget / 60 < least
        planned, budget = plan(60 * least, cost, steps), 60 * least  # as it says
    assert 0 < planned.coarse <= planned.fine <= 1
    assert planned.coarse * steps >= min(UPDATES, steps) * 0.999
    larger = plan(2 * budget, cost, steps)
    assert larger.fine >= planned.fine
    # As long as both kinds have one length, coarse trials may be shorter with the larger budget.
    assert larger.coarse >= planned.coarse or planned.coarse == planned.fine
    number, spent, fine = 0, 0.0, cost.of(planned.fine)
    while holds_coarse(number, budget - spent, planned, cost):
        spent += early * cost.of(planned.coarse)  # some end early
        number += 1
    assert FEWEST <= number <= MOST
    # What is left holds the line, or at least its first rates.
    assert spent + (3 if number <= FEWEST else 7) * fine <= budget * (1 + 1e-6) + 1e-6
