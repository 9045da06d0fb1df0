"""Checks: their outcomes, what rests on them, and processes that die or come late."""

import os
import time
from multiprocessing.util import Finalize

import pytest
import torch

from benchmarks.gpu import checks, contest, report, trainer_checks
from benchmarks.gpu.contenders import CONTENDERS, CONTESTS, OURS, TYPED, Contender
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Case, Skipped

CPU = Place(torch.device("cpu"))
MINE = Contender(OURS, TYPED)


def wrong(device):
    raise AssertionError("off by\n  one")


def breaks(device):
    raise ValueError("no such kernel")


def skips(device):
    raise Skipped("needs CUDA")


def dies(device):
    os.abort()


def hangs(device):
    time.sleep(600)


def good(device):
    Finalize(None, os.abort, exitpriority=0)  # its process dies, but after its last check


def cases(dry):
    slow = Case("slow", wrong, says_wrong=False)
    functions = (good, wrong, breaks, skips, dies, hangs)
    return [*(Case(function.__name__, function) for function in functions), slow]


@pytest.mark.usefixtures("quick_processes")
def test_outcomes_are_told_apart_and_a_death_takes_one_check_with_it(report_of):
    several = [["good", "dies", "wrong"], ["breaks", "skips", "slow"], ["good"]]
    failed = dict.fromkeys(("dies", "breaks", "slow"), "failed")
    for seconds_left, groups, states in (
        (10_000.0, several, {"good": "ok", "wrong": "wrong", **failed}),
        (0.0, [["hangs", "good"]], {"hangs": "late", "good": "late"}),
    ):
        found = report_of("checks", seconds_left)
        checks.run_beside(found, CPU, groups, cases)
        made = found.content["checks"]
        assert {check["check"]: check["state"] for check in made} == states
        reasons = {check["check"]: check["reason"] for check in made}
        if seconds_left:
            assert reasons["wrong"] == "AssertionError: off by one"
            assert reasons["dies"] == "ended by signal 6"
            assert found.content["skipped"] == [{"what": "skips", "reason": "needs CUDA"}]
        found.finish("ok")  # to be late is no failure
        assert report.exit_code(report.read(found.file)) == bool(seconds_left)


@pytest.mark.parametrize("call", checks.FIRST)
def test_rows_rest_on_checks_that_their_call_makes(call):
    names = [name for group in checks.FIRST[call] for name in group]
    assert {*names} <= {case.name for case in checks.cases()}
    assert len(names) == 6
    for contender in (c for group in CONTESTS[call] for c in group if c.ours):
        assert {*contest.rests_on(contender)} <= {*names}
    assert len(CONTENDERS) == sum(len(group) for groups in CONTESTS.values() for group in groups)


def test_a_row_names_the_checks_that_were_not_made(report_of):
    found = report_of("checks")
    first, *others = contest.rests_on(MINE)
    found.record(first, report.OK)
    found.record(others[0], report.LATE, "not finished in its time")
    rows = report_of("contest")
    rows.row("rates", rests_on=contest.rests_on(MINE), median=1.0)
    rows.row("rates", rests_on=(first,), median=2.0)
    doubted, whole = rows.content["tables"]["rates"]
    assert doubted["not_checked"] == f"{others[0]}: late; {others[1]}"
    assert "not_checked" not in whole


@pytest.mark.parametrize(
    ("state", "measured"), [("ok", True), ("late", True), ("failed", True), ("wrong", False)]
)
def test_only_a_wrong_step_is_left_out(report_of, state, measured):
    report_of("checks").record(contest.rests_on(MINE)[0], state, "why")
    found = report_of("contest")
    wanted = contest._wanted(found, CPU, CONTESTS["a"][0])
    assert (MINE in wanted) == measured
    assert all(contender in wanted for contender in CONTESTS["a"][0] if not contender.ours)
    skipped = [skip["what"] for skip in found.content["skipped"]]
    assert (MINE.name in skipped) != measured


def test_the_distance_of_two_runs_is_a_share_of_the_change():
    one = {"a": torch.tensor([2.0, 0.0]), "b": torch.tensor([0.0, 2.0]), "still": torch.zeros(2)}
    assert trainer_checks.distance(one, one) == 0
    assert trainer_checks.distance(one, {name: 0 * value for name, value in one.items()}) == 1
    other = one | {"b": torch.tensor([0.0, 1.0])}
    assert trainer_checks.distance(one, other) == pytest.approx(0.5**1.5)
