"""Small runs that tests of the trainer share."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
from largebatch.recipes.training import build
from largebatch.recipes.training.folder.lock import locked
from largebatch.recipes.training.folder.metrics import read_metrics
from largebatch.recipes.training.folder.names import LOCK
from largebatch.recipes.training.trainer import Trainer

# A small network on the photos of conftest: 53 images to train on, 23 to evaluate.
BASE = [
    "model.name=test_resnet",
    "data.image_size=32",
    "data.eval_resize=36",
    "batch_size=16",
    "micro_batch_size=4",
    "epochs=2",
    "optimizer.lr=1",
    "schedule.warmup=1ep",
    "precision=fp32",
    "device=cpu",
    "comm.ranks_per_node=null",
    "log_every=2",
    "evaluate_every=1ep",
    "checkpoint.every=null",
]
NO_BATCH_NORM = ["model.name=test_vit", "model.args.img_size=32"]


JOB = Job(0, 1, 1, torch.device("cpu"))


def make(root, run_dir, *overrides):
    here = [f"data.path={root}", f"run_dir={run_dir}"]
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    job = Job(rank, world_size, world_size, torch.device("cpu"))
    return Trainer.of(load("digits", [*BASE, *here, *overrides]), job)


def weights(trainer):
    return {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}


def train(root, run_dir, *overrides):
    """Train, and give the weights as they are at the end."""
    trainer = make(root, run_dir, *overrides)
    trainer.run()
    return weights(trainer)


def refused(function, *arguments, kind=RecipeError, **options):
    """The message of one line with which a call raises an error for the user."""
    with pytest.raises(kind) as error:
        function(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def leave_lock(folder, **fields):
    """Leave a lock in a run's folder as another process would, which these fields name."""
    with locked(folder):
        content = (folder / LOCK).read_text()
    for name, value in fields.items():
        content = re.sub(rf"(?m)^{name}=.*", f"{name}={value}", content)
    (folder / LOCK).write_text(content)
    return folder / LOCK


def timeless(run_dir):
    """A run's lines of metrics without what depends on the machine."""
    return [
        {k: v for k, v in line.items() if "second" not in k and k != "memory_bytes"}
        for line in read_metrics(run_dir)
    ]


def checkpoints(run_dir):
    """The steps of a run's checkpoints; there is nothing else beside them."""
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").iterdir())


# How far apart two runs in `double_precision` may end that make the same updates with sums in
# another order, relative to the weights. A sum of n terms rounds by at most n * 1.1e-16 of the sum
# of their magnitudes. The longest here, over the pixels of a batch for the gradient of the first
# convolution, has 16 * 16 * 16 terms: 5e-13. 1e-9 leaves a factor of 2,000 for what batch norm
# over few images, trust ratios and a dozen updates make of that, and is far below the effect of
# any wrong image, rate or statistic (1e-3 and more).
ROUNDING = 1e-9


@contextmanager
def double_precision() -> Iterator[None]:
    """Make trainers compute in FP64, so that comparisons do not depend on a processor's kernels.

    Weights start as they do in FP32, and images are those of FP32.
    """
    build_model, to_float = build.build_model, torch.Tensor.float

    def in_double(*arguments):
        model = build_model(*arguments).double()
        model.register_forward_pre_hook(lambda _, inputs: tuple(x.double() for x in inputs))
        return model

    def float_at_least(tensor, *arguments, **options):
        """``tensor.float()``, where it is meant to widen."""
        if tensor.dtype == torch.float64:
            return tensor
        return to_float(tensor, *arguments, **options)

    with (
        mock.patch.object(build, "build_model", in_double),
        mock.patch.object(torch.Tensor, "float", float_at_least),
    ):
        yield


def train_in_double(root, run_dir, *overrides):
    """Train in `double_precision`, and give the weights as they are at the end."""
    with double_precision():
        return train(root, run_dir, *overrides)


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [k for k in ours if not torch.equal(ours[k], theirs[k])] == []


def largest_difference(ours, theirs):
    return max(
        (
            (ours[k].double() - theirs[k].double()).abs().max()
            / (theirs[k].double().abs().max() + 1e-3)
        )
        for k in ours
    ).item()
