"""The suite of faults: one that is handled, one that is not, and how the suite tells them apart."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.faults import __main__ as suite
from benchmarks.faults import kinds
from benchmarks.faults.runs import FORMS, Form, differences
from benchmarks.tables import RESULTS


def other_bits(place, references, random):
    """A fault after which the weights differ by one bit."""
    reference = references.result(place.form)
    ours = {**reference, "weights": {k: dict(v) for k, v in reference["weights"].items()}}
    name, weight = next(iter(ours["weights"]["weights.pt"].items()))
    changed = weight.clone()
    changed.view(-1)[0] = torch.nextafter(changed.view(-1)[0], torch.tensor(9.0))
    ours["weights"]["weights.pt"][name] = changed
    raise kinds.UnexpectedError(f"not equal: {', '.join(differences(ours, reference))}")


@pytest.mark.slow("trains on two ranks, kills one and resumes")
def test_the_suite_tells_a_fault_that_is_handled_from_one_that_is_not(
    tmp_path, run_script, monkeypatch, capsys
):
    faults = [
        ("SIGKILL of one rank, torchrun restarts", kinds.restarted("step"), 1),
        ("a bit that differs", other_bits, 1),
    ]
    monkeypatch.setattr(suite, "forms", lambda seed: [Form("FP32, LARS", 2)])
    with pytest.raises(SystemExit) as ended:
        run_script(suite, KINDS=faults, RESULT=tmp_path / "faults.json")
    assert ended.value.code == 1
    handled, other = json.loads((tmp_path / "faults.json").read_text())["rows"]
    assert (handled["outcome"], handled["as_promised"]) == (kinds.RESUMED, True)
    assert other["outcome"].startswith("UnexpectedError: not equal: weights.weights.pt.")
    assert other["as_promised"] is False
    assert "1 of 2 faults ended as promised" in (tmp_path / "faults.md").read_text()


def test_the_stored_table_is_that_of_the_stored_faults():
    rows = json.loads((RESULTS / "faults.json").read_text())["rows"]
    stored = (RESULTS / "faults.md").read_text(encoding="utf-8")
    assert stored.startswith(suite.table(rows))
    assert {row["fault"] for row in rows} == {name for name, _, _ in suite.KINDS}
    assert len(rows) == sum(count for _, _, count in suite.KINDS)
    found = {(form.name, form.ranks) for form in suite.forms(0)}
    assert found == {(name, ranks) for name in FORMS for ranks in (1, 2, 3)}


def test_a_traceback_or_a_silent_end_is_not_a_stated_end():
    def ended(text):
        return SimpleNamespace(said=text, stacks="", end=lambda: 2)

    kinds._expect_one_line(ended("largebatch: error: run_dir: in use"), "run_dir:")
    two = "error: run_dir: in use\nerror: run_dir: used"
    silent = ("Traceback (most recent call last)\nerror: run_dir: in use", "error: other", "", two)
    for text in silent:
        with pytest.raises(kinds.UnexpectedError):
            kinds._expect_one_line(ended(text), "run_dir:")
