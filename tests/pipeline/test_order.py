"""The order of training: every image once per epoch, as a function of (seed, epoch)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from largebatch.pipeline.order import (
    FURTHER,
    UNIFORMS,
    Stream,
    epoch_order,
    evaluation_share,
    uniforms,
)

seeds = st.integers(0, 2**63 - 1)


@given(st.integers(1, 40), seeds, st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_the_stream_does_not_depend_on_how_it_is_sliced(images, seed, lengths):
    whole = Stream(images, seed).take(0, sum(lengths))
    stream, pieces, start = Stream(images, seed), [], 0
    for length in lengths:
        pieces.append(stream.take(start, length))
        start += length
    for part in (0, 1):
        np.testing.assert_array_equal(np.concatenate([p[part] for p in pieces]), whole[part])
    # Each run of `images` images is an epoch, for any slices.
    for epoch in range(sum(lengths) // images):
        order = whole[0][epoch * images : (epoch + 1) * images]
        np.testing.assert_array_equal(order, epoch_order(images, seed, epoch))
        assert sorted(order) == list(range(images))


@given(st.integers(1, 40), seeds, st.integers(0, UNIFORMS - 1))
def test_an_alternating_number_belongs_to_the_image_and_moves_by_a_half(images, seed, column):
    order, numbers = Stream(images, seed, column).take(0, 4 * images)
    of_image = np.empty((4, images))
    for epoch in range(4):
        rows = slice(epoch * images, (epoch + 1) * images)
        of_image[epoch, order[rows]] = numbers[rows, column]
    np.testing.assert_array_equal(of_image[0], of_image[2])
    np.testing.assert_array_equal(of_image[1], of_image[3])
    np.testing.assert_allclose(np.abs(of_image[1] - of_image[0]), 0.5)
    assert 0 <= of_image.min() <= of_image.max() < 1
    # The order and all other numbers stay as they are.
    plain = Stream(images, seed).take(0, 4 * images)
    np.testing.assert_array_equal(order, plain[0])
    others = np.arange(UNIFORMS) != column
    np.testing.assert_array_equal(numbers[:, others], plain[1][:, others])


def test_orders_and_random_numbers_differ_between_seeds_and_epochs():
    for seed, epoch in ((0, 1), (1, 0)):
        assert not np.array_equal(epoch_order(100, 0, 0), epoch_order(100, seed, epoch))
        assert not np.array_equal(uniforms(0, 0, 0, 9), uniforms(seed, epoch, 0, 9))


def test_the_order_is_that_of_earlier_versions():
    """Checkpoints of earlier versions rely on it; a change needs a new ``ORDER_VERSION``."""
    assert epoch_order(8, 7, 3).tolist() == [6, 2, 3, 1, 0, 5, 4, 7]
    numbers = [0.7397600193980811, 0.6503046831904483, 0.808082069213551]
    assert uniforms(7, 3, 5, 1)[0, :3].tolist() == numbers


@given(st.integers(0, 1000), st.integers(1, 50))
def test_evaluation_shares_cover_every_image_once(images, world_size):
    shares = [evaluation_share(images, rank, world_size) for rank in range(world_size)]
    assert [i for share in shares for i in share] == list(range(images))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 40), seeds, st.integers(1, 5), st.integers(0, 120), st.integers(1, 40))
def test_repeats_show_an_image_several_times_with_numbers_of_their_own(
    images, seed, repeats, start, count
):
    plain = Stream(images, seed, further=True).take(0, 4 * images)
    stream = Stream(images, seed, further=True, repeats=repeats)
    indices, numbers = stream.take(0, 4 * images)
    np.testing.assert_array_equal(numbers, plain[1])
    assert len(np.unique(numbers, axis=0)) == len(numbers)
    for begin in range(0, 4 * images, repeats):  # also where an epoch ends within it
        epoch, place = divmod(begin, images)
        shown = plain[0][epoch * images + place // repeats]
        assert set(indices[begin : begin + repeats].tolist()) == {shown}
    for epoch in range(4):  # as long as ever, and no image begins twice
        begun = range(-(-epoch * images // repeats) * repeats, (epoch + 1) * images, repeats)
        assert len({indices[begin] for begin in begun}) == len(begun)
    sliced = Stream(images, seed, further=True, repeats=repeats).take(start, count)
    whole = Stream(images, seed, further=True, repeats=repeats).take(0, start + count)
    for part, all_ in zip(sliced, whole, strict=True):
        np.testing.assert_array_equal(part, all_[start:])


def test_numbers_are_uniform_and_independent_and_further_ones_leave_the_others_as_they_are():
    plain, more = (Stream(50, 3, further=further).take(20, 70)[1] for further in (False, True))
    np.testing.assert_array_equal(more[:, :UNIFORMS], plain)
    assert more.shape == (70, UNIFORMS + FURTHER)
    numbers = Stream(4000, 3, further=True).take(0, 12_000)[1]
    assert 0 <= numbers.min() < numbers.max() < 1
    np.testing.assert_allclose(numbers.mean(0), 0.5, atol=0.015)
    np.testing.assert_allclose(numbers.std(0), np.sqrt(1 / 12), atol=0.01)
    correlation = np.corrcoef(numbers.T) - np.eye(UNIFORMS + FURTHER)
    assert np.abs(correlation).max() < 0.045
