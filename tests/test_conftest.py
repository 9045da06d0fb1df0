"""Slow tests must be marked with a reason, and a random order is that of its seed."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from tests.conftest import SLOW_SECONDS, check_slow, shuffle, unmarked


def marked(*arguments, **options):
    marker = pytest.mark.slow(*arguments, **options).mark
    return SimpleNamespace(nodeid="test_a.py::test_b", iter_markers=lambda name: [marker])


def test_a_reason_is_enough():
    check_slow([marked("trains on 4 ranks")])


@pytest.mark.parametrize(
    ("arguments", "options"),
    [((), {}), ((" ",), {}), ((4,), {}), (("a", "b"), {}), (("a",), {"timeout": 3})],
)
def test_a_slow_test_without_a_reason_is_refused(arguments, options):
    item = marked()
    item.iter_markers = lambda name: [pytest.Mark("slow", arguments, options)]
    message = r"test_a.py::test_b: slow: no reason is given; valid: "
    with pytest.raises(pytest.UsageError, match=message):
        check_slow([marked("trains"), item])


def test_long_tests_without_a_mark_are_listed():
    def report(name, seconds, *keywords):
        keywords = dict.fromkeys(keywords, 1)
        return SimpleNamespace(nodeid=name, duration=seconds, keywords=keywords)

    quick, slow = report("quick", SLOW_SECONDS / 2), report("slow", 2 * SLOW_SECONDS)
    marked_slow = report("marked", 3 * SLOW_SECONDS, "slow")
    slower = report("slower", 4 * SLOW_SECONDS)
    assert unmarked([quick, slow, marked_slow, slower]) == [slower, slow]


def test_a_seed_gives_one_order_in_which_files_stay_together():
    tests = [SimpleNamespace(path=f"{n % 5}.py", n=n) for n in range(50)]

    def order(seed):
        items = list(tests)
        shuffle(items, seed)
        return items

    assert order("1") == order("1") != order("2")
    assert sorted(item.n for item in order("1")) == list(range(50))
    paths = [item.path for item in order("1")]
    assert len(set(paths)) == 1 + sum(a != b for a, b in pairwise(paths))
