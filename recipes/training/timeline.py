"""The timeline of a run: how its steps, epochs, images and stages, and learning rates go together.

An epoch is a number of images. Where stages change the batch, the number of steps in an epoch
changes with it, so every length that a recipe gives in epochs or in fractions of the run is
converted through images, by the :class:`Timeline` that is made once for a run. The schedule of the
learning rate is a function of the images seen, so stages do not change its shape over epochs.

At a stage that changes the batch, the rate is multiplied by a factor that follows one of
- keep: the batch grows where the rate would have decayed (Smith et al. 2018, arXiv 1711.00489);
- linear, sqrt: the rate follows the batch, as with ``scale`` from one recipe to another. Smith et
  al. also grow both in proportion; Mikami et al. 2018 (arXiv 1811.05233) grow the batch
  in stages.

Momentum needs no correction at a change of batch beyond that at any change of learning rate:
gradients are means over the global batch. With the rate outside the momentum buffer (``sgd``,
``muon``, LARS dialects ``torch`` and ``larc``) the new rate applies to the whole buffer at once;
inside it (``mlperf``) the gradients already accumulated keep the old one, unless they are corrected
(``mlperf-corrected``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ...lars import Schedule, Span, constant, cosine, polynomial, step_decay, warmup
from ...pipeline import Phase, Stage, StageTimeline, lay_out
from ..errors import RecipeError
from ..schema.recipe import Recipe
from ..schema.sections import Schedule as Section
from ..words import folded, in_full


@dataclass(frozen=True)
class Timeline(StageTimeline):
    """The stages of a run with its lengths, and the effect of its stages on the learning rate."""

    end: int  # images in the whole run
    factors: tuple[float, ...]  # on the scheduled learning rate, for each of `phases`

    @cached_property
    def unit(self) -> int:
        """Greatest common divisor of the global batch sizes, in images."""
        return math.gcd(*(phase.batch_size for phase in self.phases))

    @property
    def changes(self) -> tuple[int, ...]:
        """The steps after which the batch size changes; none where there is only one."""
        steps = dict.fromkeys(s for s in self.first_steps if 0 < s < self.total_steps)
        return tuple(s for s in steps if self.batch_size(s) != self.batch_size(s - 1))

    def factor(self, step: int) -> float:
        """Factor on the scheduled rate in the step that follows the first ``step`` steps."""
        return self.factors[self.phase_index(step)]

    def progress(self, step: int) -> int:
        """:meth:`position` in multiples of :attr:`unit`: the step itself with a constant batch."""
        return self.position(step) // self.unit

    def steps(self, span: Span, after: int = 0) -> int:
        """Number of steps in a length that begins after step ``after``, rounded to the nearest."""
        if not span.unit:
            return round(span.value)
        whole = self.images if span.unit == "ep" else self.end
        left, step = span.value, after
        index = self.phase_index(after)
        for phase, ends in zip(self.phases[index:], self.first_steps[index + 1 :], strict=False):
            per_unit = whole / phase.batch_size
            if left * per_unit <= ends - step:
                return step - after + round(left * per_unit)
            left, step = left - (ends - step) / per_unit, ends
        return step - after + round(left * (whole / self.phases[-1].batch_size))

    def due(self, every: Span, step: int) -> bool:
        """Whether ``step`` is the first at or past a multiple of ``every``, which is not 0."""
        return self._multiples(every, step) > self._multiples(every, step - 1)

    def times_due(self, every: Span, after: int, until: int) -> int:
        """Number of steps past ``after`` and up to ``until`` that are :meth:`due`."""
        found = 0
        for first, end in zip(self.first_steps, (*self.first_steps[1:], until), strict=True):
            start, stop = max(after, first), min(until, end)
            if start < stop:  # a step past several multiples is due once
                multiples = self._multiples(every, stop) - self._multiples(every, start)
                found += min(stop - start, multiples)
        return found

    def _multiples(self, every: Span, step: int) -> int:
        """Number of multiples of ``every`` that the first ``step`` steps have reached."""
        if not every.unit:
            return math.floor(step / every.value + 1e-9)
        period = every.value * (self.images if every.unit == "ep" else self.end)
        return math.floor(self.position(step) / period + 1e-9)

    def last_step(self, recipe: Recipe) -> int:
        """Number of steps that the run makes before it stops."""
        if recipe.stop_after is None:
            return self.total_steps
        last = min(self.total_steps, self.steps(recipe.stop_after))
        if last < 1:
            raise RecipeError(
                f"stop_after: {recipe.stop_after} is less than one step; valid: at least 1"
            )
        return last


def timeline_of(
    recipe: Recipe, images: int, world_size: int = 1, largest_micro: int | None = None
) -> Timeline:
    """Lay out the run of a recipe on ``images`` training images and ``world_size`` ranks.

    Where the recipe leaves ``micro_batch_size`` open, ``largest_micro`` is the most images per rank
    and forward pass at the start of the run; None: all images of a rank in a step.
    """
    batch, micro = recipe.batch_size, recipe.micro_batch_size
    _check_divides("batch_size", batch, micro, world_size)
    share = batch // world_size
    first = Phase(
        0, recipe.data.image_size, batch, micro or _fitting(recipe, share, largest_micro or share)
    )
    timeline = lay_out(first, images=images, world_size=world_size)
    factors = [1.0]
    epoch, before = 0.0, "the start of the run"
    for index, stage in enumerate(recipe.stages):
        span, key = stage.from_, f"stages.{index}"
        since = _epoch_of(span, recipe.epochs, timeline)
        if since <= epoch:
            raise RecipeError(
                f"{key}.from: {span} does not come after {before}; valid: stages in order"
            )
        epoch, before = since, str(span)
        ratio = (stage.batch_size or batch) / batch
        scales = {"linear": ratio, "sqrt": math.sqrt(ratio)}
        factors.append(factors[-1] * scales.get(stage.lr or "keep", 1.0))
        batch = stage.batch_size or batch
        _check_divides(f"{key}.batch_size", batch, micro, world_size)
        timeline = timeline.then(Stage(epoch, stage.image_size, stage.batch_size, micro))
    timeline = timeline.until(recipe.epochs)
    for size in (phase.micro_batch_size for phase in timeline.phases):
        if recipe.mixing.is_on and size % recipe.mixing.group:
            what = f"{recipe.mixing.group} does not divide a micro-batch of {size}"
            raise RecipeError(f"mixing.group: {what}; valid: an even divisor of it")
    assert timeline.end is not None
    factors = factors[: len(timeline.phases)]
    found = Timeline(images, world_size, timeline.phases, timeline.end, tuple(factors))
    if found.total_steps < 1:
        raise RecipeError(_no_step(recipe, found))
    return found


def _epoch_of(start: Span, epochs: float, timeline: StageTimeline) -> float:
    """The epoch at which a stage begins, after those that are laid out already."""
    if start.unit:
        return start.value * (epochs if start.unit == "dur" else 1)
    return timeline.epoch(round(start.value))


def _fitting(recipe: Recipe, share: int, most: int) -> int:
    """The largest micro-batch up to ``most`` that divides the images of a rank in a step."""
    divisors = [n for n in range(min(share, most), 0, -1) if share % n == 0]
    whole = (n for n in divisors if n % recipe.micro_batch_unit == 0)
    return next(whole, divisors[0])


def _check_divides(key: str, batch: int, micro: int | None, world_size: int) -> None:
    """Raise RecipeError if a global batch does not divide among the ranks."""
    unit = (micro or 1) * world_size
    if batch % unit:
        pieces = f"micro-batches of {micro}" if micro else "equal shares"
        divides = (n for n in range(world_size, 0, -1) if batch % (n * (micro or 1)) == 0)
        fewer = next(divides, None)
        ranks = "" if fewer is None else f", or {fewer} rank{'s' if fewer > 1 else ''}"
        raise RecipeError(
            f"{key}: {batch} does not divide into {pieces} on {world_size} ranks; "
            f"valid: a multiple of {unit}, such as {max(1, batch // unit) * unit}{ranks}"
        )


def _no_step(recipe: Recipe, timeline: Timeline) -> str:
    """The message for a run that ends before its first step."""
    images, batch, epochs = timeline.images, recipe.batch_size, recipe.epochs
    if batch > images and epochs * images >= 1:
        return (
            f"batch_size: {batch} is too large for a run of {epochs:g} epochs of {images} training "
            f"images; valid: at most {int(epochs * images)}"
        )
    return (
        f"epochs: {epochs:g} is less than one step; valid: at least {batch / images:.3g}, as an "
        f"epoch is {timeline.steps_per_epoch:.3g} steps"
    )


# --- the learning rate of each step -----------------------------------------------------------


@dataclass(frozen=True)
class LearningRates:
    """The learning rates of a run; all lengths are in steps."""

    schedule: Schedule  # the learning rate by step, from 0
    warmup_steps: int
    decay_steps: int  # of a polynomial or cosine decay from the end of warm-up; else 0
    milestones: tuple[int, ...]  # of a step decay, from the start of the run


def learning_rates(recipe: Recipe, timeline: Timeline) -> LearningRates:
    """Return the learning rates of a recipe along the timeline of its run."""
    section, peak = recipe.schedule, recipe.optimizer.lr
    total_steps = timeline.total_steps
    rise = timeline.steps(section.warmup)
    if rise > total_steps:
        raise RecipeError(
            f"schedule.warmup: {_steps_of(section.warmup, timeline)} is longer than the run, "
            f"{recipe.epochs:g} epochs ({total_steps} steps); valid: at most {total_steps} steps. "
            "To run only the start of a schedule, keep epochs and set stop_after"
        )
    begins = timeline.progress(rise)
    decay_steps = 0
    milestones: tuple[int, ...] = ()
    if section.name == "constant":
        then = constant(peak)
    elif section.name == "step":
        milestones = _milestones(section, timeline)
        falls = [timeline.progress(m) - begins for m in milestones]
        then = step_decay(peak, falls)
    else:
        decay_steps = total_steps - rise if section.decay is None else _decay(section, timeline)
        # At least 1, so that a warm-up over the whole run still has a peak to rise to.
        length = max(1, timeline.progress(rise + decay_steps) - begins)
        if section.name == "cosine":
            then = cosine(peak, length, end=section.end)
        else:
            then = polynomial(peak, length, power=section.power, end=section.end)
    whole = warmup(then, begins, start=section.start, shape=section.warmup_shape)

    def schedule(step: int) -> float:
        return timeline.factor(step) * whole(timeline.progress(step))

    return LearningRates(schedule, rise, decay_steps, milestones)


def _milestones(section: Section, timeline: Timeline) -> tuple[int, ...]:
    for earlier, later in pairwise((section.warmup, *section.milestones)):
        if timeline.steps(later) <= timeline.steps(earlier):
            raise RecipeError(
                f"schedule.milestones: {_steps_of(later, timeline)} does not come after "
                f"{_steps_of(earlier, timeline)}; valid: ascending, counted from the start of the "
                "run, after the warm-up"
            )
    return tuple(timeline.steps(span) for span in section.milestones)


def _decay(section: Section, timeline: Timeline) -> int:
    """Length of the decay in steps, from the end of warm-up."""
    assert section.decay is not None
    rise = timeline.steps(section.warmup)
    if section.decay_from == "warmup":
        return timeline.steps(section.decay, after=rise)
    left = timeline.steps(section.decay) - rise
    if left < 1:
        raise RecipeError(
            f"schedule.decay: {_steps_of(section.decay, timeline)} from the start of the run is "
            f"not longer than the warm-up, {_steps_of(section.warmup, timeline)}; valid: a longer "
            "one, or schedule.decay_from=warmup"
        )
    return left


def _steps_of(span: Span, timeline: Timeline) -> str:
    """A length as the recipe gives it, with its number of steps."""
    return f"{span} ({timeline.steps(span)} steps)"


def schedule_in_words(recipe: Recipe, rates: LearningRates, timeline: Timeline) -> str:
    """Describe a schedule: warm-up, peak, decay and end, in one line."""
    section, peak = recipe.schedule, f"{recipe.optimizer.lr:g}"
    parts = [f"{peak} from the start"]
    if rates.warmup_steps:
        start = f" from {section.start:g}" if section.start else ""
        length = in_full(section.warmup)
        parts = [f"{section.warmup_shape} warm-up{start} to {peak} in {length}"]
    if section.name == "step":
        epochs = [f"{timeline.epoch(step):.4g}" for step in rates.milestones]
        parts.append(f"times 0.1 at epoch {folded(epochs, 30)}")
    elif section.name == "constant":
        parts.append("then constant")
    else:
        end = rates.warmup_steps + rates.decay_steps
        at = "the end" if end == timeline.total_steps else f"epoch {timeline.epoch(end):.4g}"
        shape = "cosine" if section.name == "cosine" else f"power-{section.power:g}"
        parts.append(f"{shape} decay to {section.end:g} at {at}")
    return ", ".join(parts)
