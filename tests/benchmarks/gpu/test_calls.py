"""``python -m benchmarks.gpu``: the dry run of calls, and how parts that fail are handled."""

import os
import re
import sys
import time
from pathlib import Path

import pytest
import timm
import torch

from benchmarks.gpu import calls, place, report
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.calls import Options
from benchmarks.lars.shapes import ALEXNET_BN, RESNET_50
from largebatch.recipes.models.alexnet import AlexNetBN

ROOT = Path(__file__).parents[3]

#: Why something is skipped in a dry run; with a GPU, Triton's interpreter is off.
REASONS = {"needs CUDA", "Triton's interpreter does not round to bfloat16 as a GPU does"}
REASONS.add("needs nvidia.dali")


@pytest.fixture(autouse=True)
def _parts_find_the_repository(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")


@pytest.mark.slow("runs parts of the benchmarks in processes of their own")
@pytest.mark.parametrize("call", ["a", "c", "d"])  # b has the parts of a, with more contenders
def test_a_dry_run_of_a_call_of_each_kind(call, tmp_path, capfd):
    assert main(["--dry", "--call", call, "--copy", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {f"call-{call}.json", f"call-{call}.md"}
    content = report.read(tmp_path / f"call-{call}.json")
    assert [*content["parts"]] == [*calls.CALLS[call]]
    for name, found in content["parts"].items():
        assert found["state"] == "ok", (name, found)
        assert {check["state"] for check in found["checks"]} <= {"ok"}
        assert found["tables"] or found["checks"]
        assert found["goals"] == []  # a run on the CPU cannot decide them
        rows = [row for rows in found["tables"].values() for row in rows]
        assert all(row["device"] == "cpu" for row in rows)
        if not torch.cuda.is_available():
            assert {skip["reason"] for skip in found["skipped"]} <= REASONS
    text = (tmp_path / f"call-{call}.md").read_text()
    assert capfd.readouterr().out.endswith(f"\n{text[-calls._PRINTED :]}\n")


#: A part of a call: it hangs, dies in two ways, or ends well.
PART = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu.report import Report
found = Report(Path({file!r}), {name!r}, {deadline})
found.row("rows", value=1.5)
found.check("a check of {name}", lambda: None)
{end}
"""
ENDS = {"late": "time.sleep(600)", "abort": "os.abort()", "exit": "sys.exit(3)"}
ENDS["good"] = "found.finish('ok')"


def test_parts_that_hang_or_die_keep_their_results_and_the_others_run(tmp_path, monkeypatch, capfd):
    watch, text = calls.watch, tmp_path / "call-a.md"

    def command(options, part, deadline):
        code = PART.format(file=str(options.file), name=part, deadline=deadline, end=ENDS[part])
        return [sys.executable, "-c", code]

    def watched(name, command, file, deadline):
        assert name == "late" or "| late | late |" in text.read_text()  # it is there at any time
        watch(name, command, file, deadline if name != "late" else time.monotonic() + 5)

    monkeypatch.setitem(calls.CALLS, "a", dict.fromkeys(ENDS, (1, 600)))
    monkeypatch.setattr(Options, "command", command)
    monkeypatch.setattr(calls, "watch", watched)
    assert calls.run(Options("a", tmp_path, dry=True), time.monotonic() + 600) == 1
    parts = report.read(tmp_path / "call-a.json")["parts"]
    assert {name: (part["state"], part["reason"]) for name, part in parts.items()} == {
        "late": ("late", "not finished: killed, as its time was over"),
        "abort": ("failed", "not finished: ended by signal 6"),
        "exit": ("failed", "not finished: ended with exit code 3"),
        "good": ("ok", ""),
    }
    for name in ("abort", "exit", "good"):  # `late` may have been killed before its first row
        assert parts[name]["tables"] == {"rows": [{"value": 1.5, "device": "cpu"}]}
        assert [check["state"] for check in parts[name]["checks"]] == ["ok"]
    assert "not finished: ended by signal 6" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("on_gpu", "arguments", "message"),
    [
        (True, "--call a --copy {}", "our trainer needs pydantic, rich; .* -m benchmarks.gpu.whe"),
        (False, "--call a --copy {}", "no CUDA GPU; --dry"),
        (False, "--call a", "--call and --copy are needed"),
        (False, "--dry --until -1", "--until must be above 0, not -1"),
        (False, "--dry --cifar10 nowhere", "--cifar10: no folder nowhere"),
    ],
)
def test_a_call_that_cannot_be_made_is_refused(
    tmp_path, monkeypatch, capsys, on_gpu, arguments, message
):
    absent, installed = {"pydantic", "rich"}, place.installed
    monkeypatch.setattr(place, "installed", lambda name: name not in absent and installed(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    with pytest.raises(SystemExit) as ended:
        main(arguments.format(tmp_path).split())
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])
    assert list(tmp_path.iterdir()) == []


def test_shapes_match_the_models():
    assert [tuple(p.shape) for p in timm.create_model("resnet50").parameters()] == RESNET_50
    alexnet = AlexNetBN(bn_after_pool5=True)
    assert sorted(tuple(p.shape) for p in alexnet.parameters()) == sorted(ALEXNET_BN)
