"""Processes of contenders: commands between steps, and what happens if one fails."""

import io
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import contenders, fast, turns
from benchmarks.gpu.contender import Turns
from benchmarks.gpu.contenders import BARE, CONTENDERS, OURS, TYPED
from benchmarks.gpu.goals import RATES, SUSTAINED
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Report, write
from benchmarks.gpu.sensors import Sensors, parsed
from benchmarks.gpu.turns import Failed

ROOT = Path(__file__).parents[3]

#: A contender without torch, which behaves as its first argument says.
FAKE = """
import json, os, sys, time
behaviour, rate = sys.argv[1], float(sys.argv[2])
def say(**content):
    print(json.dumps(content), flush=True)
if behaviour == "refused":
    say(refused="RecipeError: compile: 'fast' is not valid")
    sys.exit(1)
if behaviour == "breaks":
    sys.exit("no such module")
say(ready=True)
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "warm":
        if behaviour == "dies":
            os.abort()
        if behaviour == "skipped":
            say(skipped="needs CUDA")
            sys.exit(1)
        say(step_seconds=0.01, gigabytes=1.0)
    if command["do"] == "block":
        if behaviour == "hangs":
            time.sleep(60)
        say(seconds=command["steps"] * 256 / rate, steps=command["steps"])
"""

PLAIN, COMPILED = f"{BARE}: cudnn.benchmark", f"{OURS}: compiled"


@pytest.fixture
def report(tmp_path):
    file = tmp_path / "results.json"
    write(file, {"parts": {}})
    return Report(file, "fast", fast.TITLE, 10_000)


@pytest.fixture
def arena(report, monkeypatch):
    """Run fast on contenders that behave as told, by name; the others are left out."""

    def run(**behaviours):
        names = {"typed": TYPED, "plain": PLAIN, "compiled": COMPILED}
        told = {names[name]: behaviour for name, behaviour in behaviours.items()}
        rates = {TYPED: "900", PLAIN: "1000", COMPILED: "1200"}

        def command(contender, run_dir, *, dry, annotate):
            name = contender.name
            return [sys.executable, "-c", FAKE, told[name], rates[name]]

        monkeypatch.setattr(turns, "command_of", command)
        monkeypatch.setattr(fast, "CONTENDERS", {name: CONTENDERS[name] for name in told})
        monkeypatch.setattr(fast, "REPLY_SECONDS", 0.2)
        monkeypatch.setattr(fast, "LONG_BLOCK_SECONDS", 0.1)
        fast.run(report, Place(torch.device("cpu")))
        return report.content

    return run


def medians(content, table):
    return {row["contender"]: row["median"] for row in content["tables"].get(table, [])}


def test_contenders_take_turns_and_the_goals_are_computed(arena):
    content = arena(typed="works", plain="works", compiled="works")
    assert content["checks"] == content["skipped"] == []
    expected = {TYPED: 900, PLAIN: 1000, COMPILED: 1200}
    assert medians(content, RATES) == pytest.approx(expected)
    assert medians(content, SUSTAINED) == pytest.approx(expected)
    rounds = [(row["group"], row["rounds"]) for row in content["tables"][RATES]]
    assert rounds == [("eager", contenders.ROUNDS)] * 2 + [("compiled", contenders.ROUNDS)] * 3
    assert [(goal["reached"], goal["met"]) for goal in content["goals"]] == [
        (pytest.approx(1.2), True),
        (pytest.approx(1.2), True),
        (pytest.approx(1200), False),
        (pytest.approx(0.75), False),
    ]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("dies", "ended by signal 6"),
        ("breaks", "ended with exit code 1: no such module"),
        ("hangs", "no reply within 4 s; killed"),
        ("refused", "the recipe refuses compile=default: RecipeError: compile: 'fast' is not"),
    ],
)
def test_a_contender_that_fails_is_reported_and_the_others_go_on(arena, behaviour, reason):
    content = arena(typed="works", plain="works", compiled=behaviour)
    [check] = content["checks"]
    assert (check["check"], check["state"]) == (COMPILED, "failed")
    assert check["error"].startswith(reason)
    assert medians(content, SUSTAINED) == pytest.approx({TYPED: 900, PLAIN: 1000})
    assert content["goals"][0]["reached"] == pytest.approx(0.9)


def test_a_rival_that_fails_is_missing_and_no_failed_check(arena):
    content = arena(typed="works", plain="dies", compiled="skipped")
    assert content["checks"] == []
    assert content["skipped"] == [
        {"what": PLAIN, "reason": "ended by signal 6"},
        {"what": COMPILED, "reason": "needs CUDA"},
    ]
    assert medians(content, SUSTAINED) == pytest.approx({TYPED: 900})


def test_contenders_without_time_are_left_out(report, monkeypatch):
    monkeypatch.setattr(fast, "CONTENDERS", {TYPED: CONTENDERS[TYPED]})
    report._seconds = 40.0
    fast.run(report, Place(torch.device("cpu")))
    reasons = {skip["what"]: skip["reason"] for skip in report.content["skipped"]}
    assert reasons[TYPED].startswith("no time: about 12 s to start")
    assert report.content["tables"] == {}


class Slow:
    """A contender whose first steps take ``seconds`` of the report's time, and fail if ``late``."""

    def __init__(self, name, report, seconds=0.0, late=False):
        self.contender, self.started = CONTENDERS[name], False
        self._report, self._seconds, self._late = report, seconds, late

    def warm(self, seconds):
        self.started = True
        self._report._seconds -= self._seconds
        if self._late:
            raise Failed("late", f"no reply within {seconds:.0f} s; killed")
        return {}

    def end(self, *, at_once=False):
        pass


@pytest.mark.parametrize(("left", "states"), [(50.0, []), (1000.0, ["failed"])])
def test_one_of_ours_fails_if_it_hangs_but_not_if_the_time_ends(report, left, states):
    arena = fast.Arena(report, Place(torch.device("cpu")))
    arena._warm(Slow(COMPILED, report, late=True), left)
    assert [check["state"] for check in report.content["checks"]] == states
    reasons = [skip["reason"] for skip in report.content["skipped"]]
    assert reasons == ([] if states else ["no time: not ready after 50 s"])


@pytest.mark.parametrize("took", [0.0, 9_850.0])
def test_what_one_contender_took_too_long_is_not_taken_from_the_long_turns(report, took):
    arena = fast.Arena(report, Place(torch.device("cpu")))
    arena._waiting = {TYPED: Slow(TYPED, report, took), COMPILED: Slow(COMPILED, report)}
    second = arena._waiting[COMPILED]
    arena._start([CONTENDERS[TYPED], CONTENDERS[COMPILED]], reserve=95.0)
    assert second.started == (took == 0)
    assert [skip["what"] for skip in report.content["skipped"]] == [COMPILED] * (took > 0)


@pytest.mark.parametrize(
    ("part", "only", "rounds", "skipped"),
    [
        (10_000.0, None, [3], 0),
        (345.0, None, [2], 0),
        (100.0, None, [], 1),
        (10_000.0, ("graphs",), [], 0),
    ],
)
def test_long_turns_take_a_fifth_of_the_time_at_most(
    report, monkeypatch, part, only, rounds, skipped
):
    report._seconds = part
    arena, taken = fast.Arena(report, Place(torch.device("cpu"), only=only)), []
    monkeypatch.setattr(arena, "_take_turns", lambda *given: taken.append(given[3]))
    arena._alive = dict.fromkeys((TYPED, PLAIN, COMPILED))
    arena._sustain(None)
    assert (taken, len(report.content["skipped"])) == (rounds, skipped)


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("graphs", {TYPED, *(c.name for c in CONTENDERS.values() if c.group == "graphs")}),
        ("fp16", {c.name for c in CONTENDERS.values() if c.group == "fp16"}),
    ],
)
def test_one_group_alone_has_the_recipe_as_typed_beside_it(report, group, names):
    place = Place(torch.device("cpu"), only=(group,))
    assert {contender.name for contender in fast._wanted(report, place)} == names


def test_who_stays_is_chosen_by_the_rows_of_this_run(report):
    for number, rate in ((1, 2000.0), (2, 1000.0)):
        report.row(RATES, contender=PLAIN, median=rate, run=number)
    report.row(RATES, contender=f"{BARE}: compiled", median=1500.0, run=2)
    arena = fast.Arena(report, Place(torch.device("cpu")), 2)
    arena._alive = dict.fromkeys((TYPED, PLAIN, f"{BARE}: compiled"))
    assert arena._winners() == {TYPED, f"{BARE}: compiled"}


def test_rows_of_other_groups_stay_when_one_is_measured_alone(report, monkeypatch):
    for group, name in (("eager", TYPED), ("graphs", f"{OURS}: graph")):
        report.row(RATES, group=group, contender=name, median=1000.0, run=1)
    report.row(SUSTAINED, group="sustained", contender=TYPED, median=900.0, run=1)
    again = Report(report.file, "fast", fast.TITLE, 10_000)

    def measure(self, wanted):
        again.row(RATES, group="eager", contender=TYPED, median=800.0, run=self._number)

    monkeypatch.setattr(fast.Arena, "run", measure)
    fast.run(again, Place(torch.device("cpu"), only=("graphs",)))
    rows = again.content["tables"][RATES]
    assert [(r["contender"], r["median"], r["run"]) for r in rows] == [
        (TYPED, 1000.0, 1),
        (TYPED, 800.0, 2),
    ]
    assert medians(again.content, SUSTAINED) == {TYPED: 900.0}
    typed = [goal["reached"] for goal in again.content["goals"] if "as typed / " in goal["goal"]]
    assert typed == [1.0, 1.0]
    assert again.content["notes"] == ["measured later than the other groups: graphs"]


PARENT = """
import subprocess, sys, time
child = "from benchmarks.gpu.contender import end_with_parent as end; end();"
child += "import time; print('ready', flush=True); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", child])
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is of Linux")
def test_a_process_ends_with_the_one_that_started_it():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout.readline() == b"ready\n"
    parent.kill()
    parent.communicate(timeout=20)  # the child has the other end of the pipe


def serve(*commands):
    """Run a loop that counts its steps; returns its replies and the number of steps."""
    replies, steps = io.StringIO(), 0
    lines = io.StringIO("".join(json.dumps(command) + "\n" for command in commands))
    loop = Turns(lines, replies, dry=True)
    with suppress(SystemExit):
        while True:
            loop.begin()
            steps += 1
    return [json.loads(line) for line in replies.getvalue().splitlines()], steps


def test_commands_are_executed_between_the_steps_of_a_loop():
    block = {"do": "block", "steps": 3}
    [warm, first, second, host], steps = serve(
        {"do": "warm"}, block, block, {"do": "host", "steps": 4, "sleep_seconds": 0.0}
    )
    assert steps == 2 + 3 + 3 + 4
    assert warm["step_seconds"] >= 0
    assert (first["steps"], second["steps"], host["steps"]) == (3, 3, 4)
    assert first["seconds"] > 0


def test_sensors_are_read_by_name_and_time():
    assert parsed("1980, 3201, 655.25, 61\n") == {
        "SM_MHz": 1980,
        "memory_MHz": 3201,
        "watts": 655.25,
        "celsius": 61,
    }
    assert parsed("1980, 3201, [N/A], 61") == {"SM_MHz": 1980, "memory_MHz": 3201, "celsius": 61}
    sensors = Sensors(read=dict)
    sensors._samples = [(1.0, {"watts": 1.0}), (2.0, {"watts": 4.0}), (3.0, {"watts": 6.0})]
    assert sensors.between([(1.5, 3.5)]) == {"watts": 5.0}
    assert sensors.between([(7.0, 8.0)]) == {}
