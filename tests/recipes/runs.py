"""Small runs that tests of the trainer share."""

import torch
import torch.distributed as dist

from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
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
NO_BATCH_NORM = ["model.name=test_vit", "model.args.img_size=32", "model.zero_init_last_norm=false"]


def make(root, run_dir, *overrides):
    here = [f"data.path={root}", f"run_dir={run_dir}"]
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    job = Job(rank, world_size, world_size, torch.device("cpu"))
    return Trainer(load("digits", [*BASE, *here, *overrides]), job)


def weights(trainer):
    return {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}


def train(root, run_dir, *overrides):
    """Train, and give the weights as they are at the end."""
    trainer = make(root, run_dir, *overrides)
    trainer.run()
    return weights(trainer)


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [k for k in ours if not torch.equal(ours[k], theirs[k])] == []


def largest_difference(ours, theirs):
    return max(
        ((ours[k].float() - theirs[k].float()).abs().max() / (theirs[k].float().abs().max() + 1e-3))
        for k in ours
    ).item()
