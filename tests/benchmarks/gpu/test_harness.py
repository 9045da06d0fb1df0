"""``python -m benchmarks.gpu``: the dry run of each part, and how failing parts are handled."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch

from benchmarks.comm.published import alexnet_bn
from benchmarks.gpu import (
    __main__,
    contender,
    correctness,
    drive,
    fast,
    graph_checks,
    hook,
    place,
    report,
)
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Case, Report, Skipped
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
    code, content, text = dry(tmp_path, "lars_step", "hook", "cifar")
    assert code == 1
    states = {name: part["state"] for name, part in content["parts"].items()}
    assert states == {"lars_step": "ok", "hook": "failed", "cifar": "ok"}
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


def test_checks_of_other_modules_run(tmp_path, monkeypatch):
    def run(report, place):
        report.check("ranks", lambda: None)

    graphs = [Case("compiled", lambda device: None), Case("graphs", lambda device: None)]
    checks = SimpleNamespace(cases=lambda dry: graphs, run=run)
    monkeypatch.setattr(correctness, "_is_there", lambda name: True)
    monkeypatch.setattr(correctness, "_module", lambda name: checks)
    for module in (correctness.trainer_steps, correctness.lars_checks):
        monkeypatch.setattr(module, "cases", lambda dry: [])
    monkeypatch.setattr(correctness.hook, "waits_for_slow_collectives", lambda device: None)
    monkeypatch.setattr(correctness.batch_norm, "two_ranks_are_one_process", lambda device: None)
    done = [(c["check"], c["state"]) for c in further(tmp_path, dry=True)["checks"]]
    assert done[-3:] == [("graphs", "ok"), ("ranks", "ok"), ("compiled", "ok")]
    assert len(done) == 5


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
    assert all(case.seconds >= 60 for case in graph_checks.cases() if "compile=" in case.name)


def test_checks_of_other_modules_that_are_missing_fail(tmp_path, monkeypatch):
    for name in ("quick", "slow"):
        monkeypatch.setattr(correctness, name, lambda dry: [])
    monkeypatch.setattr(correctness, "_is_there", lambda name: False)
    missing = [f"checks in {name}.py" for name in correctness.FURTHER]
    found = further(tmp_path, dry=False)["checks"]
    assert [(c["check"], c["state"]) for c in found] == [(name, "failed") for name in missing]
    assert [skip["what"] for skip in further(tmp_path, dry=True)["skipped"]] == missing


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


def test_results_of_earlier_parts_stay_until_they_run_again(tmp_path):
    dry(tmp_path, "hook")
    code, content, text = dry(tmp_path, "cifar")
    assert code == 0
    assert [*content["parts"]] == ["hook", "cifar"]
    assert "| All-reduce hook | ok |" in text


def test_parts_are_skipped_when_no_time_is_left(tmp_path):
    code = main(["--dry", "--out", str(tmp_path), "--minutes", "1e-6", "--parts", "hook", "dali"])
    content = report.read(tmp_path / "gpu-dry-cpu.json")
    assert code == 0
    assert {part["reason"] for part in content["parts"].values()} == {"no time is left"}
    assert drive.run(drive.Options(tmp_path, ["hook"], 1.0, dry=True)) == 0
    content = report.read(tmp_path / "gpu-dry-cpu.json")
    assert content["parts"]["hook"]["reason"] == "no time is left"


PART = """
import os, sys, time
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
        ("time.sleep(60)", "skipped", "not finished: killed after 2 s"),
        ("found.finish('ok')", "ok", ""),
    ],
)
def test_results_of_a_part_survive_its_failure(tmp_path, end, state, reason):
    file = tmp_path / "results.json"
    report.write(file, {"parts": {}})
    command = [sys.executable, "-c", PART.format(end=end), str(file)]
    drive.watch("part", command, file, 2.0)
    found = report.read(file)["parts"]["part"]
    assert (found["state"], found["reason"]) == (state, reason)
    assert found["tables"] == {"rows": [{"value": 1.5}]}


def test_a_part_that_cannot_start_is_reported(tmp_path):
    file = tmp_path / "results.json"
    report.write(file, {"parts": {}})
    drive.watch("part", [sys.executable, "-c", "raise SystemExit(1)"], file, 10.0)
    content = report.read(file)
    assert content["parts"]["part"]["reason"] == "not finished: ended with exit code 1"
    assert report.exit_code(content) == 1


def test_goals_rows_and_reasons_are_reported(tmp_path, capsys):
    file = tmp_path / "results.json"
    about = {"dry": False, "date": "2030-01-01", "machine": {"device": "X1"}, "versions": {"a": 1}}
    report.write(file, {**about, "parts": {}})
    found = Report(file, "part", "A part", 0.0)
    found.goal("step / floor", 1.31, most=1.3)
    found.goal("theirs / ours", 10.0, least=10)
    found.row("times", name="a", median_ms=0.0123)
    found.row("times", name="b", median_ms=1234.5, note="late")
    assert not found.has_time("more", 5)
    with found.attempt("other"):
        raise Skipped("needs x")
    with found.attempt("large"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    found.finish("ok")
    content = report.read(file)
    text = report.markdown(content)
    assert "| name | median ms | note |\n|---|---:|---|\n| a | 0.0123 |  |\n" in text
    assert "| b | 1,234 | late |" in text
    assert text.startswith("### Goals")
    assert "| step / floor | 1.31 | at most 1.3 | missed |" in text
    assert "| theirs / ours | 10.0 | at least 10 | met |" in text
    skipped = ("more: no time: 0 s left, about 5 s needed", "other: needs x")
    for line in (*skipped, "large: out of memory"):
        assert f"- A part: {line}\n" in text
    assert text.endswith("2030-01-01, X1, a 1\n")
    summary = report.summary(content)
    assert "missed: step / floor: 1.31, at most 1.3" in summary
    assert "met: theirs / ours: 10.0, at least 10" in summary
    assert report.exit_code(content) == 0


def test_a_part_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    code = drive.run(drive.Options(tmp_path, ["hook"], 60.0, dry=True))
    content = report.read(tmp_path / "gpu-dry-cpu.json")
    assert (code, content["parts"]["hook"]["state"]) == (0, "ok")
    assert "| All-reduce hook | ok |" in (tmp_path / "gpu-dry-cpu.md").read_text()


def test_the_commands_of_the_help_are_valid_and_measure_what_they_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cifar10.tar.xz").touch()
    given = []
    monkeypatch.setattr(drive, "run", lambda options: given.append(options) or 0)
    monkeypatch.setattr(drive, "has_gpu", lambda: True)
    lines = [line.split() for line in __main__.__doc__.splitlines() if "  --minutes " in line]
    for line in [[], *lines]:
        assert main(["--out", "results", *line]) == 0
    assert given[0].parts == ["correctness", "fast"]
    assert {part for options in given for part in options.parts} == {*drive.PARTS} - {"dali"}
    [only] = [options for options in given if options.only]
    report.write(tmp_path / "results.json", {"parts": {}})
    found = Report(tmp_path / "results.json", "fast", "fast", drive.PLANNED * only.seconds)
    fast._wanted(found, Place(torch.device("cuda"), only=only.only))
    assert found.content["skipped"] == []


def test_a_part_ends_with_the_run_that_started_it(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(contender, "end_with_parent", lambda: called.append(True))
    for times in (0, 1):
        with pytest.raises(SystemExit):
            main(["--out", str(tmp_path), "--minutes", "0"])
        assert len(called) == times
        monkeypatch.setenv(drive.CHILD, "1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "this machine has no CUDA GPU; --dry runs on the CPU"),
        (["--minutes", "0"], "--minutes must be above 0, not 0"),
        (["--cifar10", "nowhere"], "--cifar10: no file or folder nowhere"),
        (["--parts", "lars"], "invalid choice: 'lars'"),
        (["--only", "large"], "invalid choice: 'large'"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--out", str(tmp_path), *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_shapes_match_the_models():
    assert [tuple(p.shape) for p in timm.create_model("resnet50").parameters()] == RESNET_50
    assert sorted(tuple(p.shape) for p in alexnet_bn().parameters()) == sorted(ALEXNET_BN)
