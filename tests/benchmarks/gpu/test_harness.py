"""``python -m benchmarks.gpu``: the dry run of each part, and how failing parts are handled."""

import os
import sys
from pathlib import Path

import pytest
import timm
import torch

from benchmarks.comm.published import alexnet_bn
from benchmarks.gpu import (
    correctness,
    drive,
    hook,
    place,
    report,
)
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Case, Report
from benchmarks.lars.shapes import ALEXNET_BN, RESNET_50

pytestmark = pytest.mark.slow("runs parts of the benchmarks in processes of their own")

ROOT = Path(__file__).parents[3]


def dry(out, *parts):
    code = main(["--dry", "--out", str(out), "--parts", *parts])
    assert {path.name for path in out.iterdir()} == {"gpu-dry-cpu.json", "gpu-dry-cpu.md"}
    return code, report.read(out / "gpu-dry-cpu.json"), (out / "gpu-dry-cpu.md").read_text()


@pytest.mark.parametrize("part", drive.PARTS)
def test_a_dry_run_of_each_part(part, tmp_path, monkeypatch):
    monkeypatch.setattr(correctness, "FURTHER", ())  # they have tests of their own
    monkeypatch.setattr(correctness, "_is_there", lambda name: False)
    code, content, text = dry(tmp_path, part)
    assert (code, content["dry"], content["machine"]["device"]) == (0, True, "cpu")
    found = content["parts"][part]
    assert found["state"] == "ok", found
    assert all(check["state"] == "ok" for check in found["checks"])
    assert found["tables"] or found["checks"]
    if part == "correctness":
        done = [check["check"] for check in found["checks"]]
        done += [skip["what"] for skip in found["skipped"] if skip["reason"] == "needs CUDA"]
        names = [case.name for case in correctness.cases(dry=True)]
        assert sorted(done) == sorted(names)
    assert found["goals"] == []  # a run on the CPU cannot decide them
    reasons = [skip["reason"] for skip in found["skipped"]]
    if not torch.cuda.is_available():  # with a GPU, Triton's interpreter is off
        assert set(reasons) <= {"needs CUDA", "left out of a dry run"}
    assert text.startswith("Dry run on the CPU")
    assert f"| {found['title']} | ok |" in text


def wrong(device):
    raise AssertionError("off by\n  one")


def test_a_failing_part_is_reported_and_the_rest_runs(tmp_path, monkeypatch, capsys):
    def breaks(report, place):
        report.check("bad", wrong, place.device)
        report.check("good", lambda device: None, place.device)
        raise ValueError("broken")

    monkeypatch.setattr(hook, "run", breaks)
    code, content, text = dry(tmp_path, "lars_step", "hook", "dali")
    assert code == 1
    states = {name: part["state"] for name, part in content["parts"].items()}
    assert states == {"lars_step": "ok", "hook": "failed", "dali": "ok"}
    assert "- bad: AssertionError: off by one" in text
    assert "| failed | 2 | 1 | 0 |" in text
    output = capsys.readouterr().out
    assert "failed: bad: AssertionError: off by one" in output
    assert "ValueError: broken" in output


@pytest.mark.parametrize("dies", [False, True])
def test_after_a_failure_of_correctness_nothing_else_runs(tmp_path, monkeypatch, capsys, dies):
    def cases(dry):
        if dies:
            raise MemoryError("illegal access")
        return [Case("bad", wrong), Case("good", lambda device: None)]

    monkeypatch.setattr(correctness, "quick", cases)
    monkeypatch.setattr(correctness, "slow", lambda dry: [])
    monkeypatch.setattr(correctness, "FURTHER", ())
    monkeypatch.setattr(correctness, "_is_there", lambda name: False)
    code, content, _ = dry(tmp_path, "hook", "correctness", "fast")
    assert code == 1
    states = {name: (p["state"], p["reason"]) for name, p in content["parts"].items()}
    reason = "MemoryError: illegal access" if dies else "a check failed"
    assert states["correctness"] == ("failed", reason)
    assert states["fast"] == states["hook"] == ("skipped", "not run, because correctness failed")
    checks = [check["state"] for check in content["parts"]["correctness"]["checks"]]
    assert checks == ([] if dies else ["failed", "ok"])


def further(tmp_path, *, dry, seconds=60):
    """Run the checks that the test has left; returns the section."""
    file = tmp_path / "results.json"
    report.write(file, {"parts": {}})
    found = Report(file, "correctness", correctness.TITLE, seconds)
    correctness.run(found, Place(torch.device("cpu"), dry=dry))
    found.finish("ok")
    return found.content


def test_checks_without_time_are_counted_and_are_no_failures(tmp_path, monkeypatch):
    cases = [Case("long", wrong, seconds=60), Case("short", lambda device: None)]
    monkeypatch.setattr(correctness, "FURTHER", ())
    monkeypatch.setattr(correctness, "_is_there", lambda name: False)
    monkeypatch.setattr(correctness, "quick", lambda dry: [])
    monkeypatch.setattr(correctness, "slow", lambda dry: cases)
    found = further(tmp_path, dry=False, seconds=30)
    assert (found["state"], found["reason"]) == ("ok", "no time for 1 more")
    assert [check["check"] for check in found["checks"]] == ["short"]
    assert "no time for 1 more" in report.summary({"parts": {"correctness": found}})


def test_missing_packages_fail_a_run_that_is_not_dry(tmp_path, monkeypatch, capsys):
    absent = {"pydantic", "rich"}
    installed = place.installed
    monkeypatch.setattr(place, "installed", lambda name: name not in absent and installed(name))
    monkeypatch.setattr(drive, "has_gpu", lambda: True)
    with pytest.raises(SystemExit) as exit_:
        main(["--out", str(tmp_path), "--parts", "fast"])
    assert exit_.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "our trainer needs pydantic, rich; " in line
    assert "python -m benchmarks.gpu.wheels" in line
    assert list(tmp_path.iterdir()) == []
    assert drive.missing_packages(["lars_step", "hook"]) == []


PART = """
import os, sys
from pathlib import Path
from benchmarks.gpu.report import Report
found = Report(Path(sys.argv[1]), "part", "A part", 60)
found.row("rows", value=1.5)
found.check("a check", lambda: None)
{end}
"""


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        ("os.abort()", "failed", "not finished: ended by signal 6"),
        ("sys.exit(3)", "failed", "not finished: ended with exit code 3"),
    ],
)
def test_results_of_a_part_survive_its_failure(tmp_path, end, state, reason):
    file = tmp_path / "results.json"
    report.write(file, {"parts": {}})
    command = [sys.executable, "-c", PART.format(end=end), str(file)]
    drive.watch("part", command, file, 600.0)
    found = report.read(file)["parts"]["part"]
    assert (found["state"], found["reason"]) == (state, reason)
    assert found["tables"] == {"rows": [{"value": 1.5}]}


@pytest.mark.parametrize(("part", "state"), [("fast", "skipped"), ("correctness", "failed")])
def test_a_part_that_hangs_is_killed(tmp_path, part, state):
    file = tmp_path / "results.json"
    report.write(file, {"parts": {}})
    drive.watch(part, [sys.executable, "-c", "import time; time.sleep(600)"], file, 0.1)
    found = report.read(file)["parts"][part]
    assert (found["state"], found["reason"]) == (state, "not finished: killed after 0 s")


def test_a_part_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    code = drive.run(drive.Options(tmp_path, ["hook"], 60.0, dry=True))
    content = report.read(tmp_path / "gpu-dry-cpu.json")
    assert (code, content["parts"]["hook"]["state"]) == (0, "ok")
    assert "| All-reduce hook | ok |" in (tmp_path / "gpu-dry-cpu.md").read_text()


def test_shapes_match_the_models():
    assert [tuple(p.shape) for p in timm.create_model("resnet50").parameters()] == RESNET_50
    assert sorted(tuple(p.shape) for p in alexnet_bn().parameters()) == sorted(ALEXNET_BN)
