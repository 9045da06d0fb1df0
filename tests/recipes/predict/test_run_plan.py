"""The plan of a run: how it divides among GPUs, its times, and what they rest on."""

import math

import pytest

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.predict.division import fit, gpu_counts
from largebatch.recipes.predict.presets import PUBLISHED_OVER_PREDICTED, STRAGGLER_SIGMA
from largebatch.recipes.predict.run_plan import plan_run
from largebatch.recipes.schema.load import load

#: A network that is counted quickly, in a large recipe.
SMALL = ["model.name=test_resnet", "data.image_size=32", "data.eval_resize=64"]
LINKS = {"links": "nvlink4+ndr-x8"}


def planned(gpus, *keys, name="resnet50-b65536", **options):
    options = {"measured": "128:1000", **LINKS, **options}
    return plan_run(load(name, [*SMALL, *keys]), gpus, **options)


@pytest.fixture(scope="module")
def three():
    return planned([1, 64, 1024], price=2.0)


def test_steps_and_intervals_are_the_recipes_and_the_parts_of_the_time_add_up(three):
    assert (three.steps, three.evaluations, three.checkpoints) == (1740, 23, 12)
    assert three.epochs == pytest.approx(89, abs=0.1)
    assert [p.accumulation for p in three.points] == [512, 8, 1]
    assert [p.micro_batch_size for p in three.points] == [128, 128, 64]
    assert [p.batch_norm_images for p in three.points] == [128, 128, 64]
    for point in three.points:
        times = point.times
        assert times.training == pytest.approx(three.steps * times.step)
        ideal = 65536 / point.gpus / 1000
        late = 1 + STRAGGLER_SIGMA * math.sqrt(2 * math.log(point.gpus))
        assert ideal * late <= times.step <= ideal * late * 1.1 + 0.01  # the rest is communication
        assert point.efficiency == pytest.approx(ideal / times.step)
        assert point.cost == pytest.approx(2 * point.gpus * times.total / 3600)
        node = min(8, point.gpus) * 65536 / point.gpus / times.step
        assert point.input_per_node == pytest.approx(node)
    alone, *_ = three.points
    assert (alone.reduced_bytes, alone.efficiency) == (0, pytest.approx(1))


def test_only_the_last_micro_batch_of_a_step_is_reduced():
    """Four times the accumulation adds computation, and no communication."""
    late, exposed = 1 + STRAGGLER_SIGMA * math.sqrt(2 * math.log(8)), []
    for size in (1024 * 4, 1024 * 16):
        keys = f"batch_size={size}", "schedule.warmup=1ep", "schedule.decay=null"
        (point,) = planned([8], *keys).points
        exposed.append(point.times.step - late * size / 8 / 1000)
    assert exposed[0] == pytest.approx(exposed[1])
    assert exposed[0] > 0


def test_evaluation_and_checkpoints_take_a_share_that_intervals_change():
    often = planned([64], "evaluate_every=1ep", "checkpoint.every=1ep")
    assert (often.evaluations, often.checkpoints) == (89, 89)
    rarely = planned([64], "evaluate_every=null", "target_accuracy=null", "checkpoint.every=null")
    assert (rarely.evaluations, rarely.checkpoints) == (0, 1)
    assert rarely.points[0].times.evaluation == 0
    twice = planned([64], "ema.decay=0.9")
    assert twice.points[0].times.evaluation == 2 * planned([64]).points[0].times.evaluation


def test_stages_have_their_own_steps():
    stage = "{from: 0.5dur, image_size: 64, batch_size: 32768, lr: keep}"
    keys = (f"stages=[{stage}]", "evaluate_every=null", "target_accuracy=null")
    (point,) = planned([1], *keys).points
    images = [point.timeline.phases[1].start]
    images.append(point.timeline.end - images[0])
    assert point.times.training == pytest.approx((images[0] + 4 * images[1]) / 1000)  # by pixels
    assert point.memory.activations > 2 * planned([1]).points[0].memory.activations


def test_one_range_holds_what_each_assumption_changes(three):
    for point in three.points:
        total, (shortest, longest) = point.times.total, point.between
        widths = [one.high - one.low for one in point.assumptions]
        assert widths == sorted(widths, reverse=True)
        for one in point.assumptions:
            assert shortest * (1 - 1e-9) <= one.low <= total * (1 + 1e-9)
            assert longest * (1 + 1e-9) >= one.high >= total * (1 - 1e-9)
        # Independent: more than the largest alone, less than all at their worst.
        logs = [math.log(one.high / total) for one in point.assumptions]
        assert max(logs) < math.log(longest / total) < sum(logs)


def test_scaling_is_as_uncertain_as_published_runs_beyond_the_gpus_that_were_measured():
    low, high = PUBLISHED_OVER_PREDICTED
    for gpus, measured in ((64, "128:1000"), (8, "8x128:8000")):
        (point,) = planned([gpus], measured=measured).points
        (one,) = (one for one in point.assumptions if one.name == "scaling")
        kept = (min(high, 1 / point.efficiency), low) if gpus == 64 else (1.0, 1.0)
        for seconds, share in zip((one.low, one.high), kept, strict=True):
            other = point.times.training * (1 / share - 1)
            assert seconds - point.times.total == pytest.approx(other)


def test_a_published_run_lies_in_the_range():
    """NVIDIA's examples say "~3 hours" for 90 epochs with AMP on 8 A100, 256 images each."""
    keys = ["batch_size=2048", "micro_batch_size=256", "precision=bf16"]
    plan = plan_run(load("resnet50-sgd-b256", keys), [8], gpu="a100")
    shortest, longest = plan.points[0].between
    assert plan.epochs == pytest.approx(90, abs=0.1)
    assert shortest < plan.points[0].times.total < 3 * 3600 < longest
    assert longest < 2 * plan.points[0].times.total


def test_a_step_outside_of_the_measured_batches_is_reported():
    found = planned([1, 512, 4096], measured="64:12ms,256:36ms")
    alone, inside, outside = found.points
    assert not [line for line in inside.notices if "outside" in line]
    (notice,) = [line for line in outside.notices if "outside" in line]
    assert notice.startswith("16 images per GPU are outside of 64 to 256")
    # 4 ms that do not shrink, and 0.125 ms an image.
    assert alone.times.step == pytest.approx(512 * (4e-3 + 128 * 0.125e-3))


def test_numbers_of_gpus():
    assert gpu_counts("64, 8,512,8") == [8, 64, 512]
    for text in ("", "8;16", "-8", "1.5", "8,0"):
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
    stage = "stages=[{from: 60ep, batch_size: 24576, lr: keep}]"
    keys = ["batch_size=16384", "micro_batch_size=1024", stage]
    fitted, (line,) = fit(load("resnet50-b8192", keys).recipe, 16)
    assert fitted.micro_batch_size == 512  # which divides 1,024 and 1,536
    assert line.startswith("16 GPUs need micro_batch_size=512, 2 accumulated: 24,576 / 16 = 1,536 ")
    fitted, (line,) = fit(load("resnet50-b1632").recipe, 3)  # 544 images each, 204 at a time
    assert fitted.micro_batch_size == 136
    assert line == (
        "3 GPUs need micro_batch_size=136, 4 accumulated: 1,632 / 3 = 544 images per GPU are no "
        "multiple of 204"
    )


def test_slices_of_batch_norm_and_groups_of_mixing_limit_the_micro_batch():
    keys = ["batch_norm.images=16", "mixing.cutmix=1", "mixing.group=12", "batch_size=1152"]
    keys += ["micro_batch_size=288", "schedule.warmup=0", "schedule.decay=null"]
    recipe = load("resnet50-b65536", keys).recipe
    assert fit(recipe, 3)[0].micro_batch_size == 192  # of 384 images each; 288 does not divide
    with pytest.raises(RecipeError, match=r"multiples of 48 \(batch_norm.images, mixing.group\)"):
        fit(recipe, 36)
