"""Processes of contenders: their turns, and what happens if one fails or takes too long."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import contenders, fast, turns
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
        if "hangs" in told.values():
            monkeypatch.setattr(fast, "REPLY_SECONDS", 0.2)
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


def test_contenders_without_time_are_left_out(report, monkeypatch):
    monkeypatch.setattr(fast, "CONTENDERS", {TYPED: CONTENDERS[TYPED]})
    report._seconds = 40.0
    fast.run(report, Place(torch.device("cpu")))
    reasons = {skip["what"]: skip["reason"] for skip in report.content["skipped"]}
    assert reasons[TYPED].startswith("no time: about 12 s to start")
    assert report.content["tables"] == {}


class Slow:
    """A contender that does not take its first steps in time."""

    contender = CONTENDERS[COMPILED]

    def warm(self, seconds):
        raise Failed("late", f"no reply within {seconds:.0f} s; killed")

    def end(self, *, at_once=False):
        pass


@pytest.mark.parametrize(("left", "states"), [(50.0, []), (1000.0, ["failed"])])
def test_one_of_ours_fails_if_it_hangs_but_not_if_the_time_ends(report, left, states):
    arena = fast.Arena(report, Place(torch.device("cpu")))
    arena._warm(Slow(), left)
    assert [check["state"] for check in report.content["checks"]] == states
    reasons = [skip["reason"] for skip in report.content["skipped"]]
    assert reasons == ([] if states else ["no time: not ready after 50 s"])


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
