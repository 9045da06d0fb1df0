"""Captured steps on a GPU; and on the CPU, the checks themselves on a model of CUDA graphs."""

import pytest
import torch

from benchmarks.gpu import graph_checks
from benchmarks.gpu.report import Skipped
from largebatch.amp import Precision
from largebatch.recipes.training import cuda_graph
from tests.recipes.training.recorded_graph import recorded_graphs

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
@pytest.mark.parametrize("case", list(graph_checks.cases()), ids=lambda case: case.name)
def test_on_a_gpu(case):
    case.run(CUDA)


@pytest.mark.slow("trains two runs of a small network")
def test_a_check_passes_on_the_model_of_graphs():
    settings = graph_checks.CASES["fp16-master, 4 micro-batches, clipped"]
    with recorded_graphs():
        graph_checks.captured_is_eager(settings, CPU)


@pytest.mark.slow("trains a small network")
def test_no_step_that_must_not_wait_is_one_that_reads(monkeypatch):
    with recorded_graphs():
        step = graph_checks.replayed_step(graph_checks.CASES["fp32"], CPU)
        monkeypatch.setattr(Precision, "check_skipped", lambda self: pytest.fail("waits"))
        for _ in range(graph_checks.WATCHED):
            step()


@pytest.mark.slow("trains two runs of a small network")
def test_the_checks_find_a_rate_that_is_a_number(monkeypatch):
    monkeypatch.setattr(cuda_graph, "put_rates_on_device", lambda optimizer, device: None)
    monkeypatch.setattr(cuda_graph, "options_of", lambda optimizer: None)
    with recorded_graphs(), pytest.raises(AssertionError, match="of the way apart"):
        graph_checks.captured_is_eager(graph_checks.CASES["fp32"], CPU)


def test_without_a_gpu_every_check_is_skipped():
    for case in graph_checks.cases(dry=True):
        with pytest.raises(Skipped, match="needs CUDA"):
            case.run(CPU)
