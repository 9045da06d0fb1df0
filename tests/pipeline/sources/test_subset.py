"""Holding out a part of the training images."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.pipeline import ImageFolder, Subset, hold_out
from tests.conftest import refused


@pytest.fixture(scope="module")
def folder(photos):
    return ImageFolder(photos)


@given(count=st.integers(1, 52))
def test_every_image_is_in_exactly_one_part(folder, count):
    kept, held = hold_out(folder, count)
    assert len(held) == count
    names = [part.name(i) for part in (kept, held) for i in range(len(part))]
    assert sorted(names) == [folder.name(i) for i in range(len(folder))]


def test_a_subset_keeps_bytes_and_labels(folder):
    subset = Subset(folder, [40, 3, 22])
    assert subset.classes == folder.classes
    assert subset.labels.tolist() == [2, 0, 1]
    wanted = folder.read(np.array([22, 40]))
    assert all(map(np.array_equal, subset.read(np.array([2, 0])), wanted))


def test_the_split_is_reproducible_and_has_all_classes(folder):
    kept, held = hold_out(folder, 15)
    again, _ = hold_out(folder, 15)
    assert kept.fingerprint == again.fingerprint
    fingerprints = {kept.fingerprint, held.fingerprint, folder.fingerprint}
    assert len(fingerprints | {hold_out(folder, 14)[0].fingerprint}) == 4
    assert set(held.labels) == set(kept.labels) == {0, 1, 2}


@pytest.mark.parametrize("count", [0, 53])
def test_an_empty_part_is_refused(folder, count):
    refused(f"hold out {count} of 53 images; valid: 1 to 52", hold_out, folder, count)
