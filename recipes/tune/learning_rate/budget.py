"""How long the trials of a search are, and which of them still fit into its budget.

A search has coarse trials, many and short, and fine ones, up to the recipe's own length. Both are
fitted to the budget: of minutes, by the time of a step that is measured first, or of runs of the
recipe, which needs no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import RecipeError
from ...words import duration

#: The fine trials that the budget is to hold: three on a line in the rate, two that go on along it,
#: and two with a second seed. They take this share of the budget, or less if they have full length.
FINE_TRIALS, FINE_SHARE = 7, 0.6
#: Length of a coarse trial over that of a fine one; if it cannot be shorter than the second number,
#: all trials have one length.
COARSE, ALIKE = 0.25, 0.6
#: Numbers of coarse trials: with fewer no rate can be chosen, more find little.
FEWEST, MOST = 5, 32
#: A trial has at least this number of updates.
UPDATES = 10


@dataclass(frozen=True)
class Cost:
    """What a trial takes: ``start`` and, for the recipe's whole length, ``whole`` more."""

    start: float  # its start and its evaluations
    whole: float
    unit: str  # ``seconds``, or ``runs`` of the recipe

    def of(self, share: float) -> float:
        """Cost of a trial of a share of the recipe's length."""
        return self.start + self.whole * share

    def words(self, amount: float) -> str:
        """An amount as text."""
        return duration(amount) if self.unit == "seconds" else f"{amount:.3g} runs"


@dataclass(frozen=True)
class Plan:
    """Lengths of coarse and fine trials over that of the recipe."""

    coarse: float
    fine: float


def plan(budget: float, cost: Cost, total_steps: int, spent: float = 0.0) -> Plan:
    """Fit the lengths of trials to a budget, in the unit of ``cost``, part of which is spent."""
    shortest = min(1.0, UPDATES / total_steps)
    least = spent + (FEWEST + 3) * cost.of(shortest)
    if budget < least:
        option, unit = ("minutes", 60.0) if cost.unit == "seconds" else ("runs", 1.0)
        enough = f"{math.ceil(10 * least / unit + 1e-6) / 10:.1f}".removesuffix(".0")
        passed = f", after {cost.words(spent)} that were spent on timing it" if spent else ""
        raise RecipeError(
            f"--{option}: {budget / unit:g} is too little: the shortest trial takes about "
            f"{cost.words(cost.of(shortest))}, and a search has {FEWEST + 3} at least{passed}; "
            f"valid: at least {enough}"
        )
    fitting = (FINE_SHARE * (budget - spent) / FINE_TRIALS - cost.start) / cost.whole
    fine = min(1.0, max(fitting, shortest))
    coarse = max(COARSE * fine, shortest)
    return Plan(coarse if coarse < ALIKE * fine else fine, fine)


def describe(planned: Plan, cost: Cost, budget: float, epochs: float) -> str:
    """Say what trials take, and how many fit: ``a trial of 5 epochs takes about 8.0 s``."""
    coarse, fine = cost.of(planned.coarse), cost.of(planned.fine)
    if planned.coarse == planned.fine:
        return (
            f"a trial of {planned.fine * epochs:.3g} epochs takes about {cost.words(fine)}: "
            f"{int(budget / fine)} fit into {cost.words(budget)}"
        )
    number = min(MOST, int((budget - FINE_TRIALS * fine) / coarse))
    return (
        f"a coarse trial of {planned.coarse * epochs:.3g} epochs takes about {cost.words(coarse)}, "
        f"a fine one of {planned.fine * epochs:.3g} about {cost.words(fine)}: {number} and "
        f"{FINE_TRIALS} fit into {cost.words(budget)}"
    )


def holds_coarse(number: int, left: float, planned: Plan, cost: Cost) -> bool:
    """Whether after a number of coarse trials one more fits, and the fine ones after it."""
    reserved = (3 if number < FEWEST else FINE_TRIALS) * cost.of(planned.fine)
    return number < MOST and cost.of(planned.coarse) + reserved <= left + 1e-9
