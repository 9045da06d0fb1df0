"""The overrides that make a recipe train with the settings of a trial, at its length.

All lengths of the recipe shrink with the run: warm-up, decay, milestones and stages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from ....lars import Span
from ...schema.recipe import Recipe
from ...schema.types import span_as_plain
from ...training.schedule import learning_rates
from ...training.timeline import Timeline

#: Longest warm-up that is tried, as a fraction of the run, unless the recipe's is longer.
LONGEST_WARMUP = 0.4
#: Held-out images are evaluated after each of these fractions of a trial.
EVALUATE_EVERY = 0.125

_KEYS = {
    "lr": "optimizer.lr",
    "momentum": "optimizer.momentum",
    "weight_decay": "optimizer.weight_decay",
    "trust_coefficient": "optimizer.trust_coefficient",
    "power": "schedule.power",
}


def kept(overrides: Iterable[str]) -> list[str]:
    """The overrides without those that the search sets or that a trial cannot have."""
    dropped = ("scale", "run_dir", "evaluate_every")
    return [o for o in overrides if o.partition("=")[0].strip() not in dropped]


def fraction(span: Span, recipe: Recipe, timeline: Timeline) -> float:
    """A length from the start of the run as a fraction of the run."""
    return timeline.epoch(timeline.steps(span)) / recipe.epochs


def longest_warmup(recipe: Recipe, timeline: Timeline) -> float:
    """Longest warm-up that the search tries, as a fraction of the run; it ends before a decay."""
    schedule = recipe.schedule
    first = schedule.milestones[:1]
    if schedule.decay is not None and schedule.decay_from == "start":
        first = (schedule.decay,)
    longest = max(LONGEST_WARMUP, round(fraction(schedule.warmup, recipe, timeline), 2))
    return min([longest, *(0.9 * fraction(span, recipe, timeline) for span in first)])


def setting_overrides(
    recipe: Recipe, timeline: Timeline, settings: Mapping[str, float], share: float = 1.0
) -> list[str]:
    """Return the overrides that give a recipe the values of a trial and a share of its length.

    A decay of a stated length from the end of warm-up still ends at the same place of the run.

    Args:
        recipe: The recipe.
        timeline: The timeline of its run at full length.
        settings: The trial's values.
        share: Length of the trial over that of the recipe.
    """
    epochs = recipe.epochs * share
    found = [f"{_KEYS[name]}={value!r}" for name, value in settings.items() if name in _KEYS]
    found.append(f"schedule.warmup={_epochs(settings['warmup'] * epochs)}")
    schedule = recipe.schedule
    if schedule.decay is not None and schedule.decay_from == "warmup":
        rates = learning_rates(recipe, timeline)
        end = timeline.epoch(rates.warmup_steps + rates.decay_steps) * share
        found.append(f"schedule.decay={_epochs(max(end - settings['warmup'] * epochs, 1e-3))}")
    elif schedule.decay is not None and share != 1:
        found.append(f"schedule.decay={_plain(schedule.decay, share)}")
    if share == 1:
        return found
    found.append(f"epochs={epochs!r}")
    if schedule.milestones:
        milestones = [_plain(span, share) for span in schedule.milestones]
        found.append(f"schedule.milestones={json.dumps(milestones)}")
    if recipe.stages:
        stages = [
            {
                **stage.model_dump(mode="json", by_alias=True, exclude_none=True),
                "from": _plain(stage.from_, share),
            }
            for stage in recipe.stages
        ]
        found.append(f"stages={json.dumps(stages)}")
    if recipe.stop_after is not None:
        found.append(f"stop_after={_plain(recipe.stop_after, share)}")
    return found


def _epochs(value: float) -> str:
    return str(Span(round(value, 4), "ep"))


def _plain(span: Span, share: float) -> str | int:
    """A length times ``share``; a fraction of the run stays as it is."""
    if span.unit == "dur":
        return span_as_plain(span)
    value = span.value * share
    return _epochs(value) if span.unit else max(1, round(value))
