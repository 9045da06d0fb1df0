"""Traces of several ranks have processes, threads and arrows of their own."""

import json

import pytest

from largebatch.comm import Span
from largebatch.recipes.training.profiling.figures import figures_of
from largebatch.recipes.training.profiling.trace import SPAN, STEP, of_rank, read_trace, write_trace
from tests.recipes.training.profiling.hand_made import (
    CPU_STEP,
    GPU_STEP,
    HOST,
    THREAD,
    event,
    on_gpu,
)

BASE = 1_700_000_000_000_000_000


def as_torch_writes(events):
    """With what torch adds: names of processes, all GPUs of the machine, arrows, a window."""
    more = [
        {"ph": "M", "name": "process_name", "pid": HOST, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 5, "tid": 0, "args": {"labels": "GPU 5"}},
        {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 0, "dur": 1},
        {"ph": "s", "id": 8, "cat": "ac2g", "name": "ac2g", "pid": HOST, "tid": THREAD, "ts": 1},
    ]
    return {"traceEvents": [*events, *more], "baseTimeNanoseconds": BASE}


def names(trace, what):
    return {
        (e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == what
    }


def test_ranks_have_processes_names_and_arrows_of_their_own():
    one, other = (of_rank(as_torch_writes(GPU_STEP), rank) for rank in (0, 3))
    assert names(one, "process_name") == {(100, 0): "rank 0", (101, 0): "rank 0, GPU 0"}
    assert names(other, "process_name") == {(400, 0): "rank 3", (401, 0): "rank 3, GPU 0"}
    assert {e["pid"] for e in one["traceEvents"]} == {100, 101}
    assert {e["pid"] for e in other["traceEvents"]} == {400, 401}
    arrows = [next(e for e in t["traceEvents"] if e["ph"] == "s")["id"] for t in (one, other)]
    assert arrows[0] != arrows[1]
    assert names(one, "thread_name")[100, THREAD] == "main thread"


def test_spans_become_rows_in_which_nothing_overlaps():
    times = [(10, 40), (30, 50), (40, 45)]
    spans = [
        *(Span(f"b{i}", "all-reduce", *(BASE + 1000 * t for t in ends)) for i, ends in
          enumerate(times)),
        Span("wait", "all-reduce wait", BASE + 45_000, BASE + 50_500),
    ]  # fmt: skip
    events = [e for e in CPU_STEP if e["cat"] != SPAN]
    trace = of_rank(as_torch_writes(events), 0, spans)
    rows = {tid: name for (_, tid), name in names(trace, "thread_name").items()}
    found = {e["name"]: e for e in trace["traceEvents"] if e.get("cat") == SPAN}
    assert [(found[f"b{i}"]["ts"], found[f"b{i}"]["dur"]) for i in range(3)] == [
        (10, 30),
        (30, 20),
        (40, 5),
    ]
    assert (found["wait"]["ts"], found["wait"]["dur"]) == (45, 5.5)
    assert found["b0"]["tid"] == found["b2"]["tid"] != found["b1"]["tid"]
    assert {rows[found[name]["tid"]] for name in ("b0", "b1")} == {"all-reduce"}
    assert rows[found["wait"]["tid"]] == "all-reduce wait"
    # What the back end runs beside the thread that began it leaves that thread.
    gloo = next(e for e in trace["traceEvents"] if e["name"] == "gloo:all_reduce")
    assert rows[gloo["tid"]] == "operations of the back end"
    assert gloo["tid"] != THREAD


def test_the_figures_are_those_of_the_trace_as_torch_wrote_it():
    for events in (CPU_STEP, GPU_STEP):
        before = figures_of({"traceEvents": events}, 2)
        assert figures_of(of_rank(as_torch_writes(events), 2), 2) == before


def test_a_file_is_compressed_and_read_back(tmp_path):
    trace = {"traceEvents": [event("é", 0, 1)]}
    write_trace(tmp_path / "a.json.gz", trace)
    (tmp_path / "b.json").write_text(json.dumps(trace))
    assert (tmp_path / "a.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert read_trace(tmp_path / "a.json.gz") == read_trace(tmp_path / "b.json") == trace
    assert {path.name for path in tmp_path.iterdir()} == {"a.json.gz", "b.json"}
    with pytest.raises(TypeError):  # whatever fails
        write_trace(tmp_path / "a.json.gz", {"traceEvents": [object()]})
    assert read_trace(tmp_path / "a.json.gz") == trace
    assert {path.name for path in tmp_path.iterdir()} == {"a.json.gz", "b.json"}
    with pytest.raises(OSError, match="No such file"):
        write_trace(tmp_path / "nowhere" / "a.json.gz", trace)


def test_the_main_thread_is_that_of_the_host_and_a_trace_without_a_step_is_refused():
    mark = on_gpu(f"{STEP}3", 20, 99, cat="gpu_user_annotation")
    found = of_rank(as_torch_writes([mark, *GPU_STEP]), 0)
    assert names(found, "process_name") == {(100, 0): "rank 0", (101, 0): "rank 0, GPU 0"}
    for events in ([], [mark]):
        with pytest.raises(ValueError, match="the trace holds no step"):
            of_rank({"traceEvents": events}, 0)
