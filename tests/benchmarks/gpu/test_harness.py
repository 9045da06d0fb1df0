"""``python -m benchmarks.gpu``: the dry run of each part, and how failing parts are handled."""

import json
import os
import sys
from pathlib import Path

import pytest
import timm
import torch

from benchmarks.comm.published import alexnet_bn
from benchmarks.gpu import drive, hook, lars_checks, place, report
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.report import Report, Skipped
from benchmarks.lars.shapes import ALEXNET_BN, RESNET_50

pytestmark = pytest.mark.slow("runs parts of the benchmarks in processes of their own")

ROOT = Path(__file__).parents[3]

#: Number of entries that the dry run of each part skips because they need CUDA.
NEEDS_CUDA = {
    "lars_checks": 20,
    "lars_step": 2,
    "hook": 1,
    "batch_norm": 0,
    "training": 2,
    "step_shares": 1,
    "dali": 2,
    "cifar10": 0,
}


def dry(out, *parts):
    code = main(["--dry", "--out", str(out), "--parts", *parts])
    assert {path.name for path in out.iterdir()} == {"gpu-dry-cpu.json", "gpu-dry-cpu.md"}
    return code, report.read(out / "gpu-dry-cpu.json"), (out / "gpu-dry-cpu.md").read_text()


@pytest.mark.parametrize("part", drive.PARTS)
def test_a_dry_run_of_each_part(part, tmp_path):
    code, content, text = dry(tmp_path, part)
    assert (code, content["dry"], content["machine"]["device"]) == (0, True, "cpu")
    found = content["parts"][part]
    assert found["state"] == "ok", found
    assert all(check["state"] == "ok" for check in found["checks"])
    assert found["tables"] or found["checks"]
    assert found["goals"] == []  # a run on the CPU cannot decide them
    reasons = [skip["reason"] for skip in found["skipped"]]
    if not torch.cuda.is_available():  # with a GPU, Triton's interpreter is off
        assert reasons.count("needs CUDA") == NEEDS_CUDA[part]
        assert set(reasons) <= {"needs CUDA", "left out of a dry run"}
    assert text.startswith("Dry run on the CPU")
    assert f"### {found['title']}" in text


def test_a_failing_check_is_reported_and_the_rest_runs(tmp_path, monkeypatch, capsys):
    def wrong(device):
        raise AssertionError("off by\n  one")

    def cases(dry):
        return [lars_checks.Case("bad", wrong), lars_checks.Case("good", lambda device: None)]

    def breaks(report, place):
        raise ValueError("broken")

    monkeypatch.setattr(lars_checks, "cases", cases)
    monkeypatch.setattr(hook, "run", breaks)
    code, content, text = dry(tmp_path, "lars_checks", "hook", "lars_step")
    assert code == 1
    states = {name: part["state"] for name, part in content["parts"].items()}
    assert states == {"lars_checks": "failed", "hook": "failed", "lars_step": "ok"}
    assert [check["state"] for check in content["parts"]["lars_checks"]["checks"]] == [
        "failed",
        "ok",
    ]
    assert "- bad: AssertionError: off by one" in text
    output = capsys.readouterr().out
    assert "failed: bad: AssertionError: off by one" in output
    assert "ValueError: broken" in output


def test_missing_packages_are_skipped_with_a_reason(tmp_path, monkeypatch):
    installed = place.installed
    monkeypatch.setattr(place, "installed", lambda name: name != "pydantic" and installed(name))
    code, content, _ = dry(tmp_path, "training", "step_shares")
    assert code == 0
    training, shares = content["parts"].values()
    rows = training["tables"]["images per second"]
    assert {row["loop"] for row in rows} == {"PyTorch loop", "timm's step"}
    assert "needs pydantic" in [skip["reason"] for skip in training["skipped"]]
    assert (shares["state"], shares["reason"]) == ("skipped", "needs pydantic")


def test_parts_are_skipped_when_no_time_is_left(tmp_path):
    code = main(["--dry", "--out", str(tmp_path), "--minutes", "1e-6", "--parts", "hook", "dali"])
    content = report.read(tmp_path / "gpu-dry-cpu.json")
    assert code == 0
    assert {part["reason"] for part in content["parts"].values()} == {"no time is left"}
    assert drive.run(tmp_path, ["hook"], 1.0, dry=True, here=False, cifar10=None) == 0
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
    assert "| step / floor | 1.31 | at most 1.3 | missed |" in text
    assert "| theirs / ours | 10.0 | at least 10 | met |" in text
    assert (
        "- more: no time: 0 s left, about 5 s needed\n- other: needs x\n- large: out of memory"
        in text
    )
    assert text.startswith("2030-01-01, X1, a 1\n")
    summary = report.summary(content)
    assert "missed: step / floor: 1.31, at most 1.3" in summary
    assert "met: theirs / ours: 10.0, at least 10" in summary
    assert report.exit_code(content) == 0


def test_a_part_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    code = drive.run(tmp_path, ["hook"], 60.0, dry=True, here=False, cifar10=None)
    content = report.read(tmp_path / "gpu-dry-cpu.json")
    assert (code, content["parts"]["hook"]["state"], content["minutes"]) == (0, "ok", 1.0)
    assert "### All-reduce hook" in (tmp_path / "gpu-dry-cpu.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "this machine has no CUDA GPU; --dry runs on the CPU"),
        (["--minutes", "0"], "--minutes must be above 0, not 0"),
        (["--cifar10", "nowhere"], "--cifar10: no folder nowhere/train"),
        (["--parts", "lars"], "invalid choice: 'lars'"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--out", str(tmp_path), *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def kernel(name, stream, start, end):
    return {
        "cat": "kernel",
        "name": name,
        "ts": start,
        "dur": end - start,
        "args": {"stream": stream},
    }


def test_overlap_is_read_from_a_trace():
    slow = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    events = [
        kernel("gemm", 7, 0.0, 10.0),
        kernel(slow, 20, 5.0, 25.0),
        kernel("gemm", 7, 12.0, 18.0),
        kernel("gemm", 8, 14.0, 20.0),  # overlaps another kernel: counted once
        kernel("copy", 20, 25.0, 30.0),
        kernel(slow, 20, 40.0, 50.0),
        {"cat": "cpu_op", "name": "spin_kernel", "ts": 0.0, "dur": 99.0},
        {"ph": "M", "name": "process_name"},
    ]
    kernels = hook.kernels_of(events)
    assert len(kernels) == 6
    assert hook.covered_microseconds(kernels) == (30.0, 5.0 + 8.0)
    assert hook.covered_microseconds(hook.kernels_of([json.loads('{"ph": "M"}')])) == (0, 0.0)


def test_shapes_match_the_models():
    assert [tuple(p.shape) for p in timm.create_model("resnet50").parameters()] == RESNET_50
    assert sorted(tuple(p.shape) for p in alexnet_bn().parameters()) == sorted(ALEXNET_BN)
