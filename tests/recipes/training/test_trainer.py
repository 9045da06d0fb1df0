"""The trainer: accumulation, ranks, evaluation, and the files of a run."""

import json
import re
import shutil

import pytest
import torch
import torch.distributed as dist

from largebatch.recipes.schema.load import load
from largebatch.recipes.training.folder.metrics import read_metrics
from tests.ranks import run_ranks
from tests.recipes.runs import (
    ROUNDING,
    assert_same,
    largest_difference,
    make,
    refused,
    train,
    train_in_double,
)

pytestmark = pytest.mark.slow("trains small networks, some on up to four ranks")


def test_four_ranks_on_two_nodes_make_the_updates_of_one(photos, exact, tmp_path):
    """Batch norm included: with one micro-batch size its statistics are of the same images."""
    _, alone = exact
    keys = tmp_path / "ranks", "comm.ranks_per_node=2"
    trained = run_ranks(4, train_in_double, photos, *keys)
    ours = {k: value for k, value in alone.items() if "running" not in k and "tracked" not in k}
    assert largest_difference(ours, trained[0]) < ROUNDING
    for rank in trained:
        assert_same(rank, trained[0])


def test_trust_ratios_are_written_when_asked(photos, tmp_path):
    trainer = make(photos, tmp_path, "trust_ratios_every=3")
    trainer.run()
    lines = [x for x in read_metrics(tmp_path) if x["split"] == "trust_ratio"]
    assert [line["step"] for line in lines] == [3, 6, 7]
    adapting = {
        name for g in trainer.optimizer.param_groups if g["adapt"] for name in g["param_names"]
    }
    last = trainer.optimizer.trust_ratios()
    for line in lines:
        assert line.keys() == {"split", "step", "epoch"} | adapting
        for name in adapting:
            least, median, most = line[name]
            assert 0 < least <= median <= most
    assert all(lines[-1][name] == [pytest.approx(last[name])] * 3 for name in adapting)


def refused_on_ranks(root, other, run_dir):
    rank = dist.get_rank()
    cases = (other if rank else root, "seed=0"), (root, f"epochs={2 + rank}")
    cases += ("nowhere" if rank else root, "seed=0"), (root, "micro_batch_size=16")
    return [refused(make, data, run_dir, key) for data, key in cases]


def test_what_does_not_fit_one_rank_or_differs_is_refused_on_all(photos, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(photos, other)
    next((other / "train" / "ant").iterdir()).unlink()
    first, second = run_ranks(2, refused_on_ranks, photos, other, tmp_path / "run")
    assert first == second
    images, epochs, missing, batch = first
    assert re.search(r"training images is .* on rank 0, .* rank 1", images)
    assert "the recipe's epochs is 2.0 on rank 0, 3.0 on" in epochs
    assert missing.startswith("rank 1: data.path: no folder nowhere")
    assert batch == (
        "batch_size: 16 does not divide into micro-batches of 16 on 2 ranks; "
        "valid: a multiple of 32, such as 32, or 1 rank"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.pictures
def test_a_finished_run_has_its_files_and_is_not_overwritten(photos, tmp_path):
    trained = train(photos, tmp_path / "run")
    run_dir = tmp_path / "run"
    assert {path.name for path in run_dir.iterdir()} == {
        *("checkpoints", "classes.txt", "ending.json", "metrics.jsonl", "recipe.yaml"),
        *("report.png", "summary.json", "tensorboard", "weights.pt"),
    }
    assert (run_dir / "classes.txt").read_text() == "ant\nbee\ncat\n"
    lines = read_metrics(run_dir)
    assert [(line["split"], line["step"]) for line in lines] == [
        *(("train", 2), ("train", 4), ("val", 4), ("train", 6), ("train", 7), ("val", 7))
    ]
    for line in lines:
        wanted = {"split", "step", "epoch", "loss", "top1", "top5", "seconds"}
        if line["split"] == "train":
            wanted |= {"lr", "images_per_second", "wait_seconds", "step_wait_seconds"}
            wanted |= {"memory_bytes"}
            wanted |= {"input_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds"}
        assert set(line) == wanted
        assert 0 <= line["top1"] <= line["top5"] <= 100
        assert line["epoch"] == pytest.approx(16 * line["step"] / 53, abs=1e-3)
    assert_same(torch.load(run_dir / "weights.pt"), trained)
    assert load(str(run_dir / "recipe.yaml")).recipe.batch_size == 16
    assert any((run_dir / "tensorboard").iterdir())
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["top1"] == lines[-1]["top1"]
    assert summary["versions"]["torch"] == torch.__version__.partition("+")[0]
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    assert "already holds a run; valid: resume=true to c" in refused(make, photos, run_dir)
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_a_run_folder_that_cannot_be_created_is_refused(photos, tmp_path):
    (tmp_path / "file").write_text("")
    run = tmp_path / "file" / "run"
    assert f"run_dir: {run} cannot be created: Not a directory" in refused(train, photos, run)
