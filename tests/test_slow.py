"""Slow tests must be marked with a reason."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import conftest
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


@pytest.mark.slow("starts pytest, which imports torch")
def test_a_test_that_passes_when_run_again_is_listed_with_its_first_error(tmp_path):
    (tmp_path / "conftest.py").write_text(f"exec(open({conftest.__file__!r}).read())")
    (tmp_path / "test_once.py").write_text(
        "failed = []\n"
        "def test_once():\n"
        "    if not failed:\n"
        "        failed.append(1)\n"
        "        raise RuntimeError('the first time')\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--reruns", "1", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    _, section = done.stdout.split(" failed, and was run once more -")
    assert "test_once.py::test_once (call)" in section
    assert "RuntimeError: the first time" in section
