"""The time left, against simulated runs whose every duration is known."""

import random
from types import SimpleNamespace

import pytest

from largebatch.recipes.schema.load import load
from largebatch.recipes.training.timeline import timeline_of
from largebatch.recipes.training.watch.clocks import RunClock, TimeLeft

KEYS = [
    *("data.image_size=64", "data.eval_resize=128", "batch_size=20", "micro_batch_size=null"),
    *("epochs=8", "log_every=5", "evaluate_every=1ep", "checkpoint.every=2ep"),
]
STAGES = (
    "stages=[{from: 2ep, image_size: 96}, {from: 4ep, batch_size: 40, lr: linear}, "
    "{from: 6ep, image_size: 128, batch_size: 50, lr: keep}]"
)


def estimates(*keys, first=0, slower=lambda step: 1.0):
    """Simulate a run; yield the estimate at each reading, and what is really left.

    A step takes time in proportion to its pixels. An evaluation and a checkpoint come after the
    reading of the same step.
    """
    recipe = load("digits", [*KEYS, *keys]).recipe
    timeline = timeline_of(recipe, 1000)
    last = timeline.last_step(recipe)
    at = 0.0
    clock = RunClock(now=lambda: at)
    every = {"evaluation": recipe.evaluate_every, "checkpoints": recipe.checkpoint.every}
    took = {"evaluation": 7.0, "checkpoints": 3.0}
    left, read, found = TimeLeft(timeline, clock, first, last, every), 0.0, []
    for step in range(first + 1, last + 1):
        phase = timeline.phases[timeline.phase_index(step - 1)]
        seconds = 1e-6 * phase.image_size**2 * phase.batch_size * slower(step)
        at += seconds
        read += seconds
        if step == last or timeline.due(recipe.log_every, step):
            left.read(step, read)
            read = 0.0
            found.append((step, left.seconds(step), at))
        for part in took:
            if every[part] and (step == last or timeline.due(every[part], step)):
                with clock.during(part):
                    at += took[part]
    return [SimpleNamespace(step=s, left=left, truth=at - then) for s, left, then in found]


SHAPES = [
    (),
    (STAGES,),
    (STAGES, "stop_after=5ep"),
    (STAGES, "log_every=0.02dur", "checkpoint.every=7"),
    ("evaluate_every=0.001dur", "log_every=1"),  # shorter than a step: due after each
    ("evaluate_every=null", "checkpoint.every=null", STAGES),
]


@pytest.mark.parametrize("keys", SHAPES, ids=str)
@pytest.mark.parametrize("first", [0, 37])
def test_it_is_exact_but_for_what_is_due_now_once_each_part_was_seen(keys, first):
    readings = estimates(*keys, first=first)
    assert [one.left is None for one in readings[:3]] == [True, False, False]
    for one in readings[1:]:
        assert one.left <= one.truth + 1e-6
    assert readings[-1].left == 0
    for one in [one for one in readings if one.step > 110]:  # 2 epochs: a checkpoint was made
        assert one.truth - one.left <= 7.0 + 3.0 + 1e-6, one.step


def test_noise_and_slow_readings_hardly_move_it():
    draw = random.Random(0)
    noise = {step: draw.lognormvariate(0, 0.1) for step in range(1, 401)}
    noise |= dict.fromkeys(range(1, 6), 1000.0)  # the first reading, which does not count
    stalls = dict.fromkeys(range(50, 400, 61), 20.0)  # a step that waits for something
    readings = estimates(slower=lambda step: noise[step] * stalls.get(step, 1.0))
    total = readings[0].truth
    for one in readings[22:]:  # an evaluation and a checkpoint were made
        assert abs(one.left - one.truth) < 0.15 * total, one.step
