"""Runs with stages that change the batch, and the learning rate with it."""

import copy

import pytest
import torch
import torch.nn.functional as F

from largebatch.recipes.training.folder.metrics import read_metrics
from tests.ranks import run_ranks
from tests.recipes.runs import (
    NO_BATCH_NORM,
    ROUNDING,
    assert_same,
    double_precision,
    largest_difference,
    make,
    refused,
    train,
    weights,
)

pytestmark = pytest.mark.slow("trains small networks, some on two ranks")

# 53 images: 3 steps of 16, then of 32 to epoch 2, then of 8.
STAGES = "stages=[{from: 1ep, batch_size: 32, lr: linear}, {from: 2ep, batch_size: 8, lr: sqrt}]"
RUN = [STAGES, "epochs=3", "optimizer.lr=0.2", "log_every=1", "schedule.start=0.05"]
BATCHES = [16] * 3 + [32] * 2 + [8] * 6
FACTORS = [1] * 3 + [2] * 2 + [1] * 6
SGD = ["optimizer.name=sgd", "optimizer.nesterov=true", "optimizer.weight_decay=1e-2"]


def rate(step):
    """The polynomial of `RUN` over epochs, times the factors of its stages."""
    images = sum(BATCHES[:step])
    rise = 48  # 1ep is 3 steps of 16
    if images < rise:
        return 0.05 + 0.15 * images / rise
    end = 1e-4
    return FACTORS[step] * (end + (0.2 - end) * (1 - (images - rise) / (160 - rise)) ** 2)


def test_batches_learning_rates_and_epochs_agree_also_after_a_resume(photos, tmp_path):
    folder = tmp_path / "whole"
    trained = train(photos, folder, *RUN, "checkpoint.every=1", "checkpoint.keep=99")
    lines = [line for line in read_metrics(folder) if line["split"] == "train"]
    assert [line["batch_size"] for line in lines] == BATCHES
    assert [line["lr"] for line in lines] == pytest.approx([rate(s) for s in range(11)])
    images = [sum(BATCHES[: s + 1]) for s in range(11)]
    assert [line["epoch"] for line in lines] == [round(n / 53, 4) for n in images]
    counted = [line["images_per_second"] * line["seconds"] for line in lines]
    assert counted == pytest.approx(BATCHES)
    evaluated = [line["step"] for line in read_metrics(folder) if line["split"] == "val"]
    assert evaluated == [4, 5, 11]  # the first steps past epochs 1 and 2, at 80 and 112 images
    for step in (2, 5):  # before and at a change; between them on ranks
        checkpoint = folder / "checkpoints" / f"step-{step:08d}"
        assert_same(train(photos, tmp_path / f"{step}", *RUN, f"resume={checkpoint}"), trained)


def on_ranks(root, folder, *keys):
    """With batch 8, each rank has 4 images; a run resumed in one stage continues into the next."""
    with double_precision():
        trained = train(root, folder / "2", *keys, "checkpoint.every=4", "checkpoint.keep=9")
        checkpoint = folder / "2" / "checkpoints" / "step-00000004"
        assert_same(train(root, folder / "resumed", *keys, f"resume={checkpoint}"), trained)
    return trained


def test_updates_of_two_ranks_are_those_of_plain_sgd_on_whole_batches(photos, tmp_path):
    """Gradients are means over the batch of the stage; the momentum buffer is kept."""
    keys = [*RUN, *SGD, *NO_BATCH_NORM]
    ranks = run_ranks(2, on_ranks, photos, tmp_path, *keys)
    with double_precision():
        trainer = make(photos, tmp_path / "plain", *keys)
    model = copy.deepcopy(trainer.model).train()
    start = weights(trainer)
    decay = {
        name: group["weight_decay"]
        for group in trainer.optimizer.param_groups
        for name in group["param_names"]
    }
    buffers = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    batches = iter(trainer.loader)
    for step, size in enumerate(BATCHES):
        images, labels = [], []
        while sum(map(len, labels)) < size:
            batch = next(batches)
            images.append(batch.images.double())
            labels.append(batch.labels)
        loss = F.cross_entropy(model(torch.cat(images)), torch.cat(labels), label_smoothing=0.1)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                gradient = p.grad + decay[name] * p
                buffers[name] = 0.9 * buffers[name] + gradient
                p -= rate(step) * (gradient + 0.9 * buffers[name])
    plain = model.state_dict()
    assert max(largest_difference(trained, plain) for trained in ranks) < ROUNDING
    assert largest_difference(start, plain) > 0.1


def test_images_are_evaluated_at_the_size_of_the_last_stage(photos, tmp_path):
    stages = "stages=[{from: 1ep, image_size: 24}, {from: 2ep, image_size: 36}]"
    sizes = [
        next(iter(make(photos, tmp_path, stages, *keys).val_loader)).images.shape[-1]
        for keys in ([], ["data.eval_size=28"])
    ]
    assert sizes == [36, 28]


def test_future_stages_may_change_on_resume_and_past_ones_may_not(photos, tmp_path, capsys):
    stopped = (*RUN, "stop_after=4")
    train(photos, tmp_path, *stopped)
    before = f"resume={next(iter((tmp_path / 'checkpoints').iterdir()))}"
    message = refused(make, photos, tmp_path / "a", *RUN, before, STAGES.replace("1ep", "2"))
    assert message.startswith("stages: ")
    assert "was written with other batch sizes before step 4; valid" in message
    capsys.readouterr()
    later = STAGES.replace("2ep, batch_size: 8", "2.5ep, batch_size: 16")
    assert make(photos, tmp_path / "b", *RUN, before, later).run()["step"] == 7
    assert "stages is now " in capsys.readouterr().out
