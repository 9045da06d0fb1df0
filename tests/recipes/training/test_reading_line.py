"""Lines of readings: their columns stay where they are, and they fit into a width."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.recipes.training import reading_line as columns
from largebatch.recipes.training.reading_line import joined

LABELS = ("epoch", "step", "loss", "top-1", "lr", "images/s", "wait", "GB", "left")


def parts(step, epoch, left=None, slow="", total_memory=None, **values):
    values = {"loss": 6.9, "top1": 0.1, "lr": 0.0, "images_per_second": 2500.0, **values}
    values = {"wait_seconds": 0.0, "seconds": 10.0, "memory_bytes": 61.2e9, **values}
    return [
        *columns.place("train", step, 1759, epoch, 90),
        *columns.of_training(values, total_memory),
        *columns.time_left(left),
        *columns.holding_up(slow),
    ]


def line(*where, width=None, **values):
    return joined(parts(*where, **values), width)


VALUES = {
    "loss": st.floats(0, 99),
    "top1": st.floats(0, 100),
    "lr": st.floats(1e-6, 1e3),
    "images_per_second": st.floats(0.1, 99_999),
    "wait_seconds": st.floats(0, 9.9),
    "memory_bytes": st.floats(0, 999e9),
    "left": st.floats(0, 99 * 86400),
    "step": st.integers(1, 1759),
    "epoch": st.floats(0, 90),
}


@given(st.fixed_dictionaries(VALUES))
def test_columns_stay_where_they_are(values):
    first = line(10, 0.1, left=45)
    found = line(**values)
    assert [found.index(label) for label in LABELS] == [first.index(label) for label in LABELS]
    assert len(found) == len(first)


@pytest.mark.parametrize("memory", [{}, {"total_memory": 85_017_493_504}])
def test_a_line_of_imagenet_is_not_too_long(memory):
    """With the steps of resnet50-b65536 on eight GPUs, and 12 hours to go."""
    found = line(1759, 89.98, left=12 * 3600, images_per_second=18_432, lr=0.01234, **memory)
    assert len(found) <= 120


def test_a_line_has_what_was_read():
    found = line(
        1200, 7.44, 4000, "rank 5",
        loss=4.3214, top1=21.987, lr=8.1234, wait_seconds=0.31, total_memory=85_017_493_504,
    )  # fmt: skip
    assert found == (
        "train  epoch  7.44  step 1200  loss  4.321  top-1  21.99%  lr 8.12       2,500 images/s  "
        "wait  3%  61/85 GB  left  1h07m  slow: rank 5"
    )
    values = {"loss": 1.5, "top1": 70.0, "ema_top1": 71.0, "seconds": 12.34}
    where = columns.place("val", 1200, 1759, 7.44, 90)
    found = joined([*where, *columns.of_evaluation(values, (70.5, 6.4))])
    assert found == (
        "val    epoch  7.44  step 1200  loss  1.500  top-1  70.00%  best  70.50% at epoch 6.40  "
        "EMA  71.00%  evaluated in 12.3 s"
    )


def test_slow_training_and_lost_losses_are_shown():
    found = line(1, 0.1, images_per_second=3.25, loss=float("nan"))
    assert "loss    nan  " in found
    assert "   3.2 images/s" in found or "   3.3 images/s" in found


@given(st.integers(33, 140))
def test_a_line_keeps_to_a_width_by_leaving_columns_out(width):
    whole = line(1200, 7.44, 4000, "rank 5")
    found = line(1200, 7.44, 4000, "rank 5", width=width)
    assert len(found) <= width
    assert found.startswith("train")
    assert "loss" in found
    assert "top-1" in found
    assert found == whole or len(found) < len(whole)
    texts = [part.text for part in parts(1200, 7.44, 4000, "rank 5")]
    assert found == "  ".join(text for text in texts if text.rstrip() in found).rstrip()
