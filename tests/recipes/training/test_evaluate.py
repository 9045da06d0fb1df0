"""Loss, top-1 and top-5 are those of their definitions, in training and in evaluation."""

import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from largebatch.amp import Precision
from largebatch.pipeline import ImageFolder, Loader, Transform
from largebatch.recipes.ranks import Job
from largebatch.recipes.training.evaluate import Meter, evaluate
from largebatch.recipes.training.folder.metrics import read_metrics
from tests.host_reads import NoHostReads
from tests.ranks import run_ranks
from tests.recipes.runs import JOB, make
from tests.recipes.training.small import Small


def batch(count, generator, classes=7):
    logits = torch.randn(count, classes, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    return F.cross_entropy(logits, labels), logits, labels


def right(batches, most):
    """Percentage of images whose class is among the ``most`` likely ones."""
    logits, labels = (torch.cat([b[i] for b in batches]) for i in (1, 2))
    above = (logits > logits[range(len(labels)), labels][:, None]).sum(1)  # the correct class
    return 100 * (above < most).double().mean().item()


#: Steps between two readings: the sizes of their micro-batches, whether accuracy is measured, and
#: the norm of the gradient, if any. One that is not finite is of a skipped step.
NORMS = st.sampled_from([None, 1.0, 2.5, math.inf, math.nan])
STEPS = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.booleans(), NORMS),
    min_size=1,
    max_size=6,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=3), st.integers(0, 99), st.sampled_from([3, 5, 20]))
def test_a_meter_has_means_since_its_reading_and_the_accuracy_of_the_last_step(
    intervals, seed, classes
):
    meter, generator = Meter(JOB.device), torch.Generator().manual_seed(seed)
    for steps in intervals:
        seen = []
        for sizes, measures, norm in steps:
            meter.begin_step(measures_accuracy=measures)
            last = [batch(size, generator, classes) for size in sizes]
            for each in last:
                meter.add(*each)
            seen += last
            if norm is not None:
                meter.add_gradient_norm(torch.tensor(norm))
        count = sum(len(b[2]) for b in seen)
        expected = {"loss": sum(b[0].double() * len(b[2]) for b in seen).item() / count}
        if measures:
            expected |= {"top1": right(last, 1), "top5": right(last, 5)}
        if norms := [norm for *_, norm in steps if norm is not None]:
            finite = [norm for norm in norms if math.isfinite(norm)]
            expected["gradient_norm"] = sum(finite) / len(finite) if finite else math.nan
        found = meter.read(JOB)
        assert found == (pytest.approx(expected, rel=1e-12, nan_ok=True), count)


def test_a_batch_of_training_costs_one_operator_and_no_wait():
    meter, each = Meter(JOB.device), batch(8, torch.Generator().manual_seed(0))
    with NoHostReads() as operators:  # where accuracy is measured, it does not wait either
        for measures in (False, False, False, True):
            meter.begin_step(measures_accuracy=measures)
            meter.add(*each)
    assert operators.names[:3] == ["add_"] * 3
    assert operators.names[4] != "add_"


@pytest.mark.slow("trains twice")
@pytest.mark.parametrize(
    ("keys", "logged"),
    [
        (["log_every=3", "evaluate_every=null", "stop_after=5"], [3, 5]),
        # The target is reached at the second evaluation, between readings of the meters.
        (["log_every=3", "evaluate_every=2", "target_accuracy=50"], [3, 4]),
    ],
)
def test_training_accuracy_is_that_of_the_steps_that_are_logged(
    photos, tmp_path, monkeypatch, keys, logged
):
    trainer = make(photos, tmp_path / "run", *keys, "track=[]")
    reached = iter([10.0, 60.0])
    monkeypatch.setattr(
        "largebatch.recipes.training.trainer.evaluate",
        lambda *_: {"loss": 1.0, "top1": next(reached), "top5": 90.0},
    )
    seen, add = {}, Meter.add

    def noted(meter, *each):
        seen.setdefault(trainer.step + 1, []).append(each)
        add(meter, *each)

    monkeypatch.setattr(Meter, "add", noted)
    trainer.run()
    lines = [line for line in read_metrics(tmp_path / "run") if line["split"] == "train"]
    assert [line["step"] for line in lines] == logged
    for line in lines:
        batches = seen[line["step"]]
        assert sum(len(b[2]) for b in batches) == 16
        assert line["top1"] == pytest.approx(right(batches, 1))
        assert line["top5"] == 100  # of three classes


def evaluated(root, micro_batch_size, world_size=1, rank=0, **options):
    """The metrics of a rank's evaluation, forms of the model's images, and outputs with labels."""
    job = Job(rank, world_size, world_size, torch.device("cpu"))
    loader = Loader(
        ImageFolder(root, "val"), Transform(image_size=24, eval_resize=28), training=False,
        batch_size=micro_batch_size * world_size, micro_batch_size=micro_batch_size, threads=1,
        rank=rank, world_size=world_size, backend="torchvision", on_error="skip",
        **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model, forms = Small(3), []
    with model.register_forward_pre_hook(
        lambda _, inputs: forms.append((*inputs[0].shape, inputs[0].stride(), inputs[0].dtype))
    ):
        values = evaluate(model, loader, Precision("fp32"), job)
    model.eval()
    with torch.no_grad():
        return values, forms, [(model(x), y) for x, y in loader]


def assert_metrics(values, plain):
    logits, labels = (torch.cat(tensors) for tensors in zip(*plain, strict=True))
    assert values["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    assert values["top1"] == pytest.approx(100 * (logits.argmax(1) == labels).double().mean())


@pytest.mark.parametrize(
    ("micro_batch_size", "counts", "last"),
    [
        (4, [4, 2, 4, 4, 4], torch.contiguous_format),
        (5, [5, 3, 5, 5], torch.channels_last),
        (64, [18], torch.channels_last),
    ],
)
def test_a_model_that_is_evaluated_sees_one_shape(photos, tmp_path, micro_batch_size, counts, last):
    """Also of batches with images that are skipped; those that have no other are left out."""
    root = tmp_path / "data"
    shutil.copytree(photos, root)
    source = ImageFolder(root, "val")
    for index in (5, 6, *range(20, 23)):
        Path(source.name(index)).write_bytes(b"")
    values, forms, plain = evaluated(root, micro_batch_size, memory_format=last)
    shape = min(micro_batch_size, 23), 3, 24, 24
    strides = torch.empty(shape, memory_format=last).stride()
    assert [len(labels) for _, labels in plain] == counts
    assert forms == len(counts) * [(*shape, strides, torch.float32)]
    assert_metrics(values, plain)


def ranks_evaluate(*cases):
    return [evaluated(*case, dist.get_world_size(), dist.get_rank()) for case in cases]


@pytest.mark.slow("starts four ranks")
def test_ranks_with_unequal_shares_and_without_images_see_one_shape(photos, tmp_path):
    """The first of four ranks has 5 of 23 images, the others 6; and it has none of three."""
    few = tmp_path / "few"
    shutil.copytree(photos, few)
    for folder in (few / "val").iterdir():
        for path in sorted(folder.iterdir())[1:]:
            path.unlink()
    cases = {(photos, 64): 6, (photos, 5): 5, (few, 2): 1}
    by_case = zip(*run_ranks(4, ranks_evaluate, *cases), strict=True)
    for found, most in zip(by_case, cases.values(), strict=True):
        assert {count for _, forms, _ in found for count, *_ in forms} == {most}
        for values, *_ in found:
            assert_metrics(values, [each for *_, plain in found for each in plain])
