"""Tests that need a CUDA GPU, of the code paths that tests on a CPU cannot take.

The checks of LARS, the hook and DALI are the functions that ``python -m benchmarks.gpu`` runs.
"""

import pytest
import torch

from benchmarks.gpu import batch_norm, dali, hook, lars_checks, training
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


@pytest.mark.parametrize("case", list(lars_checks.cases()), ids=lambda case: case.name)
def test_lars(case):
    run(case.run, CUDA)


@pytest.mark.parametrize("precision", ["bf16", "fp16-master"])
def test_the_trainer_never_synchronizes_in_a_step(precision):
    run(training.trainer_never_waits, precision, Place(CUDA, dry=True))


def test_dali_decodes_the_same_images_on_the_gpu_as_on_the_cpu(photos):
    run(dali.gpu_decodes_as_the_processor, photos, CUDA)


@pytest.mark.parametrize(("algorithm", "wire_dtype"), hook.CASES)
def test_the_hook_on_nccl_computes_the_gradients_of_plain_ddp(algorithm, wire_dtype):
    run(hook.gradients_are_those_of_ddp, algorithm, wire_dtype, CUDA)


def test_gradients_are_not_read_before_slow_collectives_finish():
    run(hook.waits_for_slow_collectives, CUDA)


def test_the_hook_overlaps_with_backward(tmp_path):
    file = tmp_path / "results.json"
    write(file, {"parts": {}})
    report = Report(file, "hook", hook.TITLE, 60)
    run(hook.overlap, report, Place(CUDA))
    assert [check["error"] for check in report.content["checks"]] in ([""], [])


def test_batch_norm_over_ranks_equals_batch_norm_in_one_process():
    run(batch_norm.two_ranks_are_one_process, CUDA)


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
