"""The benchmark of faults sees a difference of one bit, and knows a stated end from a crash."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from benchmarks.faults import __main__ as main
from benchmarks.faults import kinds, runs, soak
from benchmarks.faults.__main__ import KINDS, forms, run_one, table
from benchmarks.faults.runs import FORMS, Form, Place, References, differences
from benchmarks.faults.soak import Look, flat, look
from benchmarks.faults.watched import Watched
from largebatch.pipeline.prepare import prepare_digits


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    out = tmp_path_factory.mktemp("digits") / "digits"
    prepare_digits(out)
    return out


def result(value=1.0):
    weights = {"weights.pt": {"fc.weight": torch.tensor([value, 2.0])}}
    return {"weights": weights, "metrics": [{"step": 2, "loss": 1.5}]}


def test_a_difference_of_one_bit_is_seen():
    assert differences(result(), result()) == []
    next_to_one = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).item()
    assert differences(result(next_to_one), result()) == ["weights.weights.pt.fc.weight"]
    other = result() | {"metrics": [{"step": 2, "loss": 1.5000001}]}
    assert differences(other, result()) == ["metrics"]
    assert differences(result() | {"weights": {}}, result()) == ["weights"]


@pytest.mark.slow("trains four times on two ranks")
def test_a_killed_run_ends_with_the_bits_of_the_reference_and_no_others(digits, tmp_path):
    form, references = Form("FP32, LARS", 2), References(tmp_path, digits)
    fault = kinds.killed("one", "step")
    row = run_one("killed", fault, form, references, tmp_path, digits, "0")
    assert (row["outcome"], row["as_promised"]) == (kinds.RESUMED, True)
    weights = references.result(form)["weights"]["weights.pt"]
    next(iter(weights.values())).view(-1)[0] += 1e-6
    row = run_one("killed", fault, form, references, tmp_path, digits, "0")
    assert row["outcome"].startswith("UnexpectedError: not equal: weights.weights.pt.")
    assert row["as_promised"] is False


def started(text, code):
    return SimpleNamespace(said=text, stacks="", end=lambda: code)


def test_a_reference_that_failed_is_run_again(monkeypatch, tmp_path):
    codes = iter((1, 0))

    def start(place):
        place._prepare(None)
        return started("it failed", next(codes))

    monkeypatch.setattr(Place, "start", start)
    monkeypatch.setattr(runs, "result_of", lambda place: result())
    references = References(tmp_path, tmp_path)
    with pytest.raises(RuntimeError, match="it failed"):
        references.result(Form("FP32, LARS", 3))
    assert differences(references.result(Form("FP32, LARS", 3)), result()) == []


@pytest.mark.slow("starts two ranks and ends them")
def test_a_rank_that_does_not_begin_says_where_it_is(digits, tmp_path, monkeypatch):
    place = Place(tmp_path / "run", digits, Form("FP32, LARS", 2))
    entry = tmp_path / "entry.py"
    entry.write_text(
        "import sys\nfrom benchmarks.faults import watched\nwatched.BEGUN_BY_SECONDS = 0.5\n"
        + Path(runs.ENTRY).read_text().replace("main(sys.argv[1:])", "import time; time.sleep(3)")
    )
    monkeypatch.setattr(runs, "ENTRY", entry)
    run = place.start()
    assert run.end() == 0
    assert run.stacks.count("entry.py") == 2
    assert "stack-0-1:" in place.stacks
    place.clear()


def test_a_traceback_or_a_silent_end_is_not_a_stated_end():
    kinds._expect_one_line(started("largebatch: error: run_dir: in use", 2), "run_dir:")
    two = "error: run_dir: in use\nerror: run_dir: used"
    silent = ("Traceback (most recent call last)\nerror: run_dir: in use", "error: other", "", two)
    for text in silent:
        with pytest.raises(kinds.UnexpectedError):
            kinds._expect_one_line(started(text, 2), "run_dir:")


def test_damage_is_of_its_kind(tmp_path):
    path, content = tmp_path / "file", bytes(range(100))
    for seed in range(20):
        path.write_bytes(content)
        kinds._damage(path, "bit", Random(seed))
        pairs = zip(path.read_bytes(), content, strict=True)
        assert sum((new ^ old).bit_count() for new, old in pairs) == 1
        path.write_bytes(content)
        kinds._damage(path, "truncated", Random(seed))
        assert content.startswith(path.read_bytes())
        assert path.stat().st_size < 100
    kinds._damage(path, "removed", Random(0))
    assert not path.exists()


@pytest.mark.parametrize("into", ["input", "gradient", "weight"])
def test_a_number_that_is_not_finite_comes_at_its_step_alone(monkeypatch, into):
    monkeypatch.setenv(
        "LARGEBATCH_FAULTS_INJECTED",
        f'{{"into": "{into}", "value": "nan", "rank": 0, "step": 2}}',
    )
    model, watched = torch.nn.Conv2d(1, 1, 1), Watched()
    watched.on_start(SimpleNamespace(job=SimpleNamespace(rank=0), step=0, model=model))
    for step in range(2):
        watched.on_step_begin(step)
        model.zero_grad()
        model(torch.ones(2, 1, 2, 2)).sum().backward()
        assert model.weight.grad.isfinite().all() == (step == 0 or into == "weight")
        assert model.weight.isfinite().all() == (step == 0 or into != "weight")


def test_at_least_a_hundred_faults_in_all_forms_on_one_to_three_ranks():
    assert sum(count for _, _, count in KINDS) >= 100
    found = forms(0)
    assert {(form.name, form.ranks) for form in found} == {(n, r) for n in FORMS for r in (1, 2, 3)}
    names = [name for name, _, _ in KINDS]
    assert len(set(names)) == len(names)


def test_the_table_counts_outcomes():
    row = {"fault": "kill", "form": "FP32, LARS", "ranks": 2, "as_promised": True}
    rows = [row | {"outcome": "equal"}, row | {"outcome": "equal", "ranks": 3}]
    text = table([*rows, row | {"outcome": "Error: no\nmore", "as_promised": False}])
    assert "| kill | 3 | equal (2); Error: no (1) |" in text
    assert "2 of 3 faults ended as promised: 2 on 2, 1 on 3 ranks. By form: FP32, LARS 3." in text


def test_kinds_that_are_run_again_replace_their_rows_alone(tmp_path, monkeypatch):
    made = []

    def fake(name, fault, form, references, folder, data, seed):
        made.append(name)
        row = {"fault": name, "form": form.name, "ranks": form.ranks, "outcome": f"{len(made)}"}
        return row | {"as_promised": True, "date": "2026-11-23"}

    monkeypatch.setattr(main, "run_one", fake)
    monkeypatch.setattr(main, "RESULT", tmp_path / "faults.json")
    first = main.run_all(tmp_path, tmp_path, 0, "")
    again = main.run_all(tmp_path, tmp_path, 0, "SIGSTOP")
    assert [row["fault"] for row in again] == [row["fault"] for row in first]
    changed = {new["fault"] for new, old in zip(again, first, strict=True) if new != old}
    assert changed == {name for name, _, _ in KINDS if "SIGSTOP" in name}
    assert json.loads((tmp_path / "faults.json").read_text())["rows"] == again


def test_what_grows_is_not_flat():
    def looks(**growth):
        late = {"megabytes": 100.0, "descriptors": 20, "threads": 5} | growth
        return [
            *(Look(s, 100, 20, 5) for s in (500, 700)),
            *(Look(s, **late) for s in (1600, 1990)),
        ]

    assert flat(looks(), 2000)
    assert flat(looks(megabytes=102), 2000)
    assert flat([*looks(), Look(1700, 100, 30, 9)], 2000)  # a checkpoint's files
    for growth in ({"megabytes": 104.0}, {"descriptors": 21}, {"threads": 6}):
        assert not flat(looks(**growth), 2000)
        assert "grows" in soak.table({0: looks(**growth)}, 2000)


HOLDS = """
import sys, threading, time
ballast = bytearray(64_000_000) if sys.argv[1:] else None
opened = open("/dev/null") if sys.argv[1:] else None
threading.Thread(target=time.sleep, args=(60,), daemon=True).start() if sys.argv[1:] else None
print("ready", flush=True)
time.sleep(60)
"""


def test_a_process_is_looked_at():
    seen = []
    for arguments in ([], ["more"]):
        command = [sys.executable, "-c", HOLDS, *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            seen.append(look(process.pid, 7))
            process.kill()
            process.wait()
            with pytest.raises(OSError, match=r"."):
                look(process.pid, 7)
    less, more = seen
    assert more.megabytes > less.megabytes + 50
    assert (more.descriptors, more.threads) == (less.descriptors + 1, less.threads + 1)


def test_a_kill_that_came_too_late_is_not_counted(tmp_path, monkeypatch):
    """It is tried at other moments, and said if the run was too fast for all of them."""
    ended = SimpleNamespace(end=lambda: 0, ranks=dict, said="")
    monkeypatch.setattr(Place, "start", lambda self, **options: ended)
    monkeypatch.setattr(kinds, "_moment", lambda *arguments: [2**22 + 1])
    form = Form("FP32, LARS", 1)
    row = run_one("killed", kinds.killed("all", "step"), form, None, tmp_path, tmp_path, "0")
    assert (row["outcome"], row["as_promised"]) == (
        "the run ended before each of five moments",
        False,
    )


def test_the_folder_of_a_fault_is_removed(tmp_path):
    place = Place(tmp_path / "place", tmp_path, Form("FP32, LARS", 1))
    (place.folder / "run").mkdir(parents=True)
    place.clear()
    assert not place.folder.exists()
