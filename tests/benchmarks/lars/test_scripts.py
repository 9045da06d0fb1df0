"""Each script of benchmarks/lars runs at a small size and writes its table."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import timm
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.lars import (
    crosschecks,
    gradient_noise,
    host_time,
    muon_cost,
    muon_crosschecks,
    muon_sharing,
    orthogonalization,
    step,
    trust_ratios,
)
from benchmarks.lars.shapes import TINY
from benchmarks.tables import RESULTS
from largebatch.lars import newton_schulz
from largebatch.lars.triton import tables
from tests.ranks import CONTEXT


def stored(name):
    return (RESULTS / f"{name}.md").read_text(encoding="utf-8")


def test_the_cost_of_muon_is_the_stored_one(run_script):
    written = run_script(muon_cost)["muon_cost"]
    # The last line has the versions.
    assert written.splitlines()[:-1] == stored("muon_cost").splitlines()[:-1]


def test_host_time(run_script, tmp_path, cells_of, monkeypatch):
    monkeypatch.setattr(tables.number_on, "_entries", OrderedDict())  # other tests have filled it
    written = run_script(host_time, "--repeats", 2, "--out", tmp_path)["lars_host_time"]
    anew, cached, *launches = cells_of(written)
    assert float(anew[1]) > 0
    assert float(cached[3]) > 0
    assert launches == cells_of(stored("lars_host_time"))[2:]


def test_trust_ratios(run_script, cells_of):
    written = run_script(trust_ratios, "--steps", 20)["trust_ratios"]
    ((step_ms, watching_ms, share),) = cells_of(written)
    assert float(step_ms) > 0
    assert float(watching_ms) > 0
    assert float(share.rstrip("%")) > 0


def test_a_step(run_script, cells_of):
    cases = {"tiny": step.Case(TINY[:20], step.FP32)}
    changed = {"CASES": cases, "_BY_OTHERS": float("inf"), "_LEAST_SECONDS": 1e-3}
    rows = cells_of(run_script(step, "--repeats", 2, **changed)["lars_step"])
    assert [row[1] for row in rows] == [*step.FP32]
    assert rows[0][5] == "1.00"
    assert all(float(row[5]) > 0 and float(row[6]) > 0 for row in rows)


def test_lars_against_other_libraries(run_script, cells_of):
    few = {"DIALECTS": ("mlperf",), "FORMS": [("", {})], "STEPS": 11}
    quick = {name: row for name, row in crosschecks.CONVENTIONS.items() if name != "optax"}
    rows = cells_of(run_script(crosschecks, **few, CONVENTIONS=quick)["lars_crosschecks"])
    pairs = {(row[0], row[1]) for row in cells_of(stored("lars_crosschecks"))}
    assert len(quick) < len(rows)
    assert {(row[0], row[1]) for row in rows} <= pairs
    assert max(float(row[2]) for row in rows) < 1e-10


def test_muon_against_other_libraries(run_script, cells_of, monkeypatch):
    every = muon_crosschecks.combinations
    first = {"combinations": lambda settings: [*every(settings)][:1]}
    rows = cells_of(run_script(muon_crosschecks, **first)["muon_crosschecks"])
    assert [row[:2] for row in rows] == [r[:2] for r in cells_of(stored("muon_crosschecks"))]
    assert max(float(row[2]) for row in rows if "BF16" not in " ".join(row)) < 1e-8


def test_gradient_noise(run_script, monkeypatch):
    monkeypatch.setattr(timm, "create_model", lambda _, make=timm.create_model: make("test_resnet"))
    written = run_script(gradient_noise, "--steps", 1, IMAGES=2)["gradient_noise"]
    assert "share of a measured step" in written


def test_operators_and_bytes_of_the_gradient_noise():
    gradients = [torch.ones(3, 4), torch.ones(5), torch.ones(4, 4, dtype=torch.bfloat16)]
    size = (12 + 5) * 4 + 16 * 2
    one, four = (gradient_noise.counted(gradients, passes) for passes in (2, 4))
    assert one.of_pass == four.of_pass == 3  # one norm each
    assert (one.bytes, four.bytes) == (3 * size, 5 * size)  # norms of norms do not count


def spawn(function, arguments, ranks):
    """Call a function on each rank, in processes that start quickly."""
    processes = [CONTEXT.Process(target=function, args=(r, *arguments)) for r in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * ranks


@pytest.mark.slow("starts two ranks")
def test_sharing_sends_the_bytes_of_the_formula(run_script, tmp_path, cells_of):
    name = "ResNet-9, width 16"
    options = ("--repeats", 2, "--cases", name, "--out", tmp_path)
    changed = {"multiprocessing": SimpleNamespace(spawn=spawn)}
    ((title, *_, stated, sent),) = cells_of(
        run_script(muon_sharing, *options, **changed)["muon_sharing"]
    )
    assert (title, stated) == (name, sent)


def test_orthogonalization(run_script, cells_of, monkeypatch):
    monkeypatch.setattr("benchmarks.lars.step._LEAST_SECONDS", 1e-3)
    changed = {"hidden": lambda _: [(8, 20), (12, 6)], "RESNET_50_HIDDEN": [(9, 9)], "BATCH": 2}
    changed |= {"CONDITIONS": (10.0,), "DTYPES": {"FP32": torch.float32}}
    rows = cells_of(
        run_script(orthogonalization, "--repeats", 2, "--shared", **changed)["orthogonalization"]
    )
    errors = [row for row in rows if row[1] == "FP32"]
    assert len(errors) == len(orthogonalization.NS_COEFFICIENTS) * len(orthogonalization.FORMS)
    assert all(float(row[4]) < 1e-2 for row in errors)
    times = [row for row in rows if row[0].startswith("ResNet-")]
    assert len(times) == 7 + 6 + 4
    assert all(float(row[-1]) > 0 for row in times)


class Products(TorchDispatchMode):
    """Record the shapes of the matrix products."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("bmm", "baddbmm"):
            self.seen.append((name, *(tuple(tensor.shape) for tensor in args[:3])))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(2, 8, 30), (3, 9, 9)])
def test_the_products_that_newton_schulz_is_compared_with_are_its_own(shape):
    batch = torch.randn(shape)
    alone = orthogonalization.products(batch)
    with Products() as found:
        alone()
    with Products() as expected:
        newton_schulz(batch)
    assert sorted(found.seen) == sorted(expected.seen)
