"""Tests that need a CUDA GPU, of the code paths that tests on a CPU cannot take.

Those of correctness, the hook and DALI are the functions that ``python -m benchmarks.gpu`` runs.
"""

from importlib import import_module

import pytest
import torch

from benchmarks.gpu import correctness, dali, hook
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Report, Skipped, write
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]

CUDA = torch.device("cuda", 0)


def run(check, *arguments):
    try:
        check(*arguments)
    except Skipped as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("case", list(correctness.cases()), ids=lambda case: case.name)
def test_correctness(case):
    run(case.run, CUDA)


def test_the_hook_on_several_ranks_of_one_gpu(tmp_path):
    file = tmp_path / "results.json"
    write(file, {"parts": {}})
    report = Report(file, "ranks", "ranks", 600)
    import_module(f"benchmarks.gpu.{correctness.RANKS}").run(report, Place(CUDA))
    assert report.content["checks"] or report.content["skipped"]
    assert [check for check in report.content["checks"] if check["state"] == "failed"] == []


def test_dali_decodes_the_same_images_on_the_gpu_as_on_the_cpu(photos):
    run(dali.gpu_decodes_as_the_processor, photos, CUDA)


def test_the_hook_overlaps_with_backward(tmp_path):
    file = tmp_path / "results.json"
    write(file, {"parts": {}})
    report = Report(file, "hook", hook.TITLE, 60)
    run(hook.overlap, report, Place(CUDA))
    assert [check["error"] for check in report.content["checks"]] in ([""], [])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_trainer_learns_the_digits(digits, tmp_path, precision):
    overrides = [
        f"data.path={digits}",
        f"run_dir={tmp_path}",
        f"precision={precision}",
        "epochs=8",
        "schedule.warmup=2ep",
    ]
    trainer = Trainer(load("digits", overrides), Job(0, 1, 1, CUDA))
    assert trainer.run()["top1"] >= 95
