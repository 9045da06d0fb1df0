"""A test that takes many seconds says why."""

from types import SimpleNamespace

import pytest

from tests.conftest import SLOW_SECONDS, check_slow, unmarked


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
    with pytest.raises(pytest.UsageError, match=r"test_a.py::test_b: slow: says not why; valid: "):
        check_slow([marked("trains"), item])


def test_what_takes_long_unmarked_is_listed():
    def report(name, seconds, *keywords):
        keywords = dict.fromkeys(keywords, 1)
        return SimpleNamespace(nodeid=name, duration=seconds, keywords=keywords)

    quick, slow = report("quick", SLOW_SECONDS / 2), report("slow", 2 * SLOW_SECONDS)
    told, slower = report("told", 3 * SLOW_SECONDS, "slow"), report("slower", 4 * SLOW_SECONDS)
    assert unmarked([quick, slow, told, slower]) == [slower, slow]
