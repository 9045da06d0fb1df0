"""The plan of a run: how it divides among GPUs, its times, and what they rest on."""

import math

import pytest

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.predict.assumptions import PUBLISHED, compared_with_published
from largebatch.recipes.predict.division import fit, gpu_counts
from largebatch.recipes.predict.presets import STRAGGLER_SIGMA
from largebatch.recipes.predict.run_plan import plan_run
from largebatch.recipes.schema.load import load

#: A network that is counted quickly, in a large recipe.
SMALL = ["model.name=test_resnet", "data.image_size=32", "data.eval_resize=64"]
LINKS = {"links": "nvlink4+ndr-x8"}


def planned(gpus, *keys, name="resnet50-b65536", **options):
    options = {"images_per_second": 1000.0, **LINKS, **options}
    return plan_run(load(name, [*SMALL, *keys]), gpus, **options)


@pytest.fixture(scope="module", autouse=True)
def _one_precision():
    """Each is counted alike, and takes its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("largebatch.recipes.predict.run_plan.PRECISIONS", ("bf16",))
        yield


@pytest.fixture(scope="module")
def three():
    return planned([1, 64, 1024], price=2.0)


def test_steps_epochs_and_intervals_are_the_recipes(three):
    assert (three.steps, three.evaluations, three.checkpoints) == (1740, 23, 12)
    assert three.epochs == pytest.approx(89, abs=0.1)
    assert [p.accumulation for p in three.points] == [512, 8, 1]
    assert [p.micro_batch_size for p in three.points] == [128, 128, 64]
    assert [p.batch_norm_images for p in three.points] == [128, 128, 64]


def test_the_parts_of_the_time_add_up(three):
    for point in three.points:
        times = point.times
        steps = three.steps * times.step_seconds
        assert times.compute + times.exposed + times.waiting == pytest.approx(steps)
        late = STRAGGLER_SIGMA * math.sqrt(2 * math.log(point.gpus))
        assert times.waiting == pytest.approx(times.compute * late)
        assert times.compute == pytest.approx(three.steps * 65536 / point.gpus / 1000)
        assert times.efficiency == pytest.approx(times.compute / steps)
        batches = math.ceil(50_000 / (point.micro_batch_size * point.gpus))
        each = 0.5 + batches * point.micro_batch_size / 3000
        assert times.evaluation == pytest.approx(23 * each)
        assert point.cost == pytest.approx(2 * point.gpus * times.total / 3600)
    alone, *_ = three.points
    assert (alone.reduced_bytes, alone.times.exposed, alone.times.efficiency) == (0, 0, 1)


def test_only_the_last_micro_batch_of_a_step_is_reduced():
    """Four times the accumulation adds computation, and no communication."""
    few, many = (
        planned([8], f"batch_size={size}", "schedule.warmup=1ep", "schedule.decay=null")
        for size in (1024 * 4, 1024 * 16)
    )
    exposed = [p.points[0].times.exposed / p.steps for p in (few, many)]
    assert exposed[0] == pytest.approx(exposed[1])
    assert exposed[0] > 0


def test_evaluation_and_checkpoints_take_a_share_that_intervals_change():
    often = planned([64], "evaluate_every=1ep", "checkpoint.every=1ep")
    assert (often.evaluations, often.checkpoints) == (89, 89)
    rarely = planned([64], "evaluate_every=null", "target_accuracy=null", "checkpoint.every=null")
    assert (rarely.evaluations, rarely.checkpoints) == (0, 1)
    assert rarely.points[0].times.evaluation == 0
    twice = planned([64], "ema.decay=0.9")
    plain = planned([64])
    assert twice.points[0].times.evaluation == 2 * plain.points[0].times.evaluation
    given = planned([64], checkpoint_seconds=7.0, evaluation_images_per_second=64e3)
    assert given.points[0].times.checkpoints == 7 * given.checkpoints
    assert given.points[0].times.evaluation < plain.points[0].times.evaluation


def test_stages_have_their_own_steps():
    stage = "{from: 0.5dur, image_size: 64, batch_size: 32768, lr: keep}"
    found = planned([8], f"stages=[{stage}]", "evaluate_every=null", "target_accuracy=null")
    images = [found.points[0].timeline.phases[1].start]
    images.append(found.points[0].timeline.end - images[0])
    expected = (images[0] + 4 * images[1]) / 8 / 1000  # four times the pixels
    assert found.points[0].times.compute == pytest.approx(expected)
    memory = {one.precision: one for one in found.points[0].memory}
    plain = {one.precision: one for one in planned([8]).points[0].memory}
    assert memory["bf16"].activations > 2 * plain["bf16"].activations


def test_the_assumption_that_dominates_is_the_one_that_changes_most(three):
    for point in three.points:
        widths = [effect.high - effect.low for effect in point.effects]
        assert widths == sorted(widths, reverse=True)
        for effect in point.effects:
            assert effect.low <= point.times.total * (1 + 1e-9)
            assert effect.high >= point.times.total * (1 - 1e-9)
    names = [point.effects[0].assumption.name for point in three.points]
    assert names[0] == "speed of one GPU"
    assert names[1] == "what the simulation leaves out"
    # The latter and the links are of no effect on one GPU.
    alone = {e.assumption.name: e for e in three.points[0].effects}
    for name in ("speed of the links", "what the simulation leaves out"):
        assert alone[name].high == alone[name].low


def test_what_is_left_out_is_varied_as_published_points_differ(three):
    ratios = sorted(published / predicted for _, published, predicted in PUBLISHED)
    left_out = next(
        e for e in three.points[1].effects if e.assumption.name == "what the simulation leaves out"
    )
    times = three.points[1].times
    training = times.compute + times.exposed + times.waiting
    for seconds, kept in ((left_out.low, ratios[-1]), (left_out.high, ratios[0])):
        assert seconds - times.total == pytest.approx(training * (1 / kept - 1))
    line = compared_with_published()
    assert line.startswith(f"{len(PUBLISHED)} published efficiencies that set no constant")
    assert f"{ratios[0]:.2f} to {ratios[-1]:.2f} times" in line


def test_a_step_outside_of_the_measured_batches_is_reported():
    found = planned([512, 4096], images_per_second=None, measured="64:12,256:36")
    inside, outside = found.points
    assert not [line for line in inside.notices if "outside" in line]
    (notice,) = [line for line in outside.notices if "outside" in line]
    assert notice.startswith("16 images per GPU are outside of 64 to 256")
    # 4 ms that do not shrink, and 0.125 ms an image.
    assert outside.times.compute == pytest.approx(found.steps * (4e-3 + 16 * 0.125e-3))


@pytest.mark.parametrize(
    ("text", "expected"), [("8", [8]), ("64, 8,512", [8, 64, 512]), ("2,2", [2])]
)
def test_numbers_of_gpus(text, expected):
    assert gpu_counts(text) == expected


@pytest.mark.parametrize("text", ["", "x", "8;16", "-8", "8,", "1.5", "0", "8,0"])
def test_no_numbers_of_gpus(text):
    with pytest.raises(RecipeError, match=r"^--gpus: .*; valid: "):
        gpu_counts(text)


def test_a_micro_batch_that_does_not_divide_is_replaced_by_the_largest_that_does():
    recipe = load("resnet50-b65536").recipe
    for gpus in (1, 64, 512, 1024, 4096, 32768):
        fitted, lines = fit(recipe, gpus)
        share, micro = 65536 // gpus, fitted.micro_batch_size
        assert share % micro == 0
        assert micro == min(128, share)
        assert len(lines) == (gpus > 512)
    fitted, (line,) = fit(load("resnet50-b1632").recipe, 3)  # 544 images each, 204 at a time
    assert fitted.micro_batch_size == 136
    assert line == (
        "3 GPUs need micro_batch_size=136, 4 accumulated: 1,632 / 3 = 544 images per GPU are no "
        "multiple of 204"
    )


def test_slices_of_batch_norm_limit_the_micro_batch():
    keys = ["batch_norm.over=ghost", "batch_norm.images=48", "batch_size=1152"]
    keys += ["micro_batch_size=288", "schedule.warmup=0", "schedule.decay=null"]
    recipe = load("resnet50-b65536", keys).recipe
    assert fit(recipe, 3)[0].micro_batch_size == 192  # of 384 images each; 288 does not divide
    with pytest.raises(RecipeError, match=r"slices of 48 \(batch_norm.images\); valid: fewer"):
        fit(recipe, 36)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(RecipeError) as raised:
        fit(load("resnet50-b65536").recipe, 48)
    assert str(raised.value) == (
        "--gpus: 48 does not divide batch_size 65536; valid: 32 or 64 GPUs, or batch_size=65520 "
        "or 65568"
    )
