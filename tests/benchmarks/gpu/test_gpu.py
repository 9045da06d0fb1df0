"""Tests that need a CUDA GPU, of the code paths that tests on a CPU cannot take.

Those of the checks, the hook and DALI are what ``python -m benchmarks.gpu --call c`` runs.
"""

import pytest
import torch

from benchmarks.gpu import checks, dali, hook
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Skipped
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


@pytest.mark.parametrize("case", checks.cases(), ids=lambda case: case.name)
def test_checks(case):
    run(case.run, CUDA)


def test_the_hook_on_every_back_end(report_of):
    report = report_of("hook")
    hook.run(report, Place(CUDA))
    assert report.content["checks"]
    assert {check["state"] for check in report.content["checks"]} == {"ok"}


def test_dali_decodes_the_same_images_on_the_gpu_as_on_the_cpu(photos):
    run(dali.gpu_decodes_as_the_processor, photos, CUDA)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_trainer_learns_the_digits(digits, tmp_path, precision):
    overrides = [f"data.path={digits}", f"run_dir={tmp_path}", f"precision={precision}"]
    overrides += ["epochs=8", "schedule.warmup=2ep"]
    trainer = Trainer.of(load("digits", overrides), Job(0, 1, 1, CUDA))
    assert trainer.run()["top1"] >= 95
