"""The time left, against simulated runs whose every duration is known."""

import pytest

from largebatch.recipes.schema.load import load
from largebatch.recipes.training.timeline import timeline_of
from largebatch.recipes.training.watch.clocks import TimeLeft

KEYS = [
    *("data.image_size=64", "data.eval_resize=128", "batch_size=20", "micro_batch_size=null"),
    *("epochs=8", "log_every=5"),
]
STAGES = (
    "stages=[{from: 2ep, image_size: 96}, {from: 4ep, batch_size: 40, lr: linear}, "
    "{from: 6ep, image_size: 128, batch_size: 50, lr: keep}]"
)


@pytest.mark.parametrize(
    ("keys", "pause"),
    [((), 0.0), ((STAGES,), 0.0), ((STAGES, "stop_after=5ep"), 0.0), ((), 7.0)],
    ids=str,
)
@pytest.mark.parametrize("first", [0, 37])
def test_it_is_what_is_left_of_the_pixels_at_the_pace_since_the_first_reading(keys, first, pause):
    """A step takes time in proportion to its pixels; one in ten is followed by a pause."""
    recipe = load("digits", [*KEYS, *keys]).recipe
    timeline = timeline_of(recipe, 1000)
    last = timeline.last_step(recipe)
    at = 1e4  # seconds: the start-up does not count
    left, found = TimeLeft(timeline, last, lambda: at), []
    for step in range(first + 1, last + 1):
        phase = timeline.phases[timeline.phase_index(step - 1)]
        at += 1e-6 * phase.image_size**2 * phase.batch_size
        if step == last or timeline.due(recipe.log_every, step):
            found.append((left.seconds(step), at))
        at += pause if step % 10 == 0 else 0.0
    assert [seconds is None for seconds, _ in found[:3]] == [True, False, False]
    assert found[-1][0] == 0
    end = found[-1][1]
    for seconds, then in found[len(found) // 2 if pause else 1 :]:
        assert abs(seconds - (end - then)) <= (2 * pause or 1e-6)
