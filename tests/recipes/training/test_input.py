"""The input of a run: unusable images, shards, stages of image size, and waiting."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from largebatch.pipeline import DataError, InputTimes, Transform, stall_advice
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.predict.schedule import outline
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.folder.metrics import read_metrics
from largebatch.recipes.training.folder.outcome import metrics_of, results_of
from largebatch.recipes.training.screen import closing
from tests.pipeline.formats import write_data_set
from tests.ranks import run_ranks
from tests.recipes.runs import JOB, NO_BATCH_NORM, make

pytestmark = pytest.mark.slow("trains small networks, some on two ranks")


def summary_of(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def train_on(root, run_dir):
    keys = "data.on_error=skip", "data.verify=strict", *NO_BATCH_NORM
    trainer, lines = make(root, run_dir, *keys), []
    trainer.display.warn = trainer._readings._warn = lines.append
    trainer.run()
    return lines


def test_damaged_images_are_skipped_and_named_once_for_all_ranks(photos, tmp_path):
    root = tmp_path / "data"
    shutil.copytree(photos, root)
    for path in ("train/ant/000.JPEG", "train/cat/004.JPEG", "val/cat/002.JPEG"):
        (root / path).write_bytes(b"")
    cut = root / "train" / "bee" / "001.JPEG"
    cut.write_bytes(cut.read_bytes()[:-100] + b"\xff\xd9")
    lines, _ = run_ranks(2, train_on, root, tmp_path / "run")
    empty, strict = "cannot be decoded: it is empty", "is damaged: Corrupt JPEG data: premature end"
    assert sorted(line.partition("/data/")[2] for line in lines) == [
        f"train/ant/000.JPEG: {empty}",
        f"train/bee/001.JPEG: {strict} of data segment",
        f"train/cat/004.JPEG: {empty}",
        f"val/cat/002.JPEG: {empty}",
    ]
    assert summary_of(tmp_path / "run")["skipped_images"] == 4
    # The one that can be decoded is used unless images are verified.
    assert make(root, tmp_path / "used", "data.on_error=skip").run()["skipped_images"] == 3


@pytest.mark.parametrize("source", ["webdataset", "tfrecord", "recordio"])
def test_a_recipe_trains_on_shards(photos, tmp_path, source):
    shards = tmp_path / "shards"
    write_data_set(source, shards, photos, images_per_shard=20)
    trained = make(shards, tmp_path / "run", f"data.source={source}", "stop_after=2")
    assert trained.run()["step"] == 2
    loaded = load("digits", [f"data.path={shards}", f"data.source={source}"])
    assert outline(loaded).images.startswith("53 images")
    with pytest.raises((DataError, RecipeError), match=rf"holds shards, .* data.source={source}$"):
        make(shards, tmp_path / "other")
    message = rf"no data folder .*/nothing/train|no folder {tmp_path}/nothing; it must hold train/"
    with pytest.raises((DataError, RecipeError), match=message):
        make(tmp_path / "nothing", tmp_path / "other", f"data.source={source}")


def test_a_run_that_waits_for_data_gets_advice(photos, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(closing, "INPUT_BOUND", 0.0)
    trainer = make(photos, tmp_path / "run", "epochs=1", "log_every=3")
    trainer.loader.reader.read_seconds = 1e6  # a slow disk
    trainer.run()
    (line,) = (line for line in read_metrics(tmp_path / "run") if line["split"] == "train")
    waits, summary = line["step_wait_seconds"], summary_of(tmp_path / "run")
    assert len(waits) == 3
    assert sum(waits) == pytest.approx(line["wait_seconds"], abs=1e-4)
    assert summary["longest_wait_seconds"] == max(waits)
    assert summary["input_advice"][1].startswith("shards: files of ")
    output = capsys.readouterr().out
    assert "training waited for data: an image takes" in output
    assert "suggestion: shards" in output


FAST = InputTimes(1e-4, 1e-3, 1e-3, None, 336, 300.0, 1e5)


@pytest.mark.parametrize(
    ("waits", "share", "advised"),
    [
        # 10 s, in which 500 images are trained on
        ([5.0, 0.1, 0.1], 0.04, False),  # a slow start of a fast input
        ([5.0, 1.0, 1.5], 0.5, True),
        ([0.2, 2.0, 2.7], 0.4796, True),
    ],
)
def test_advice_leaves_out_the_first_wait(tmp_path, monkeypatch, waits, share, advised):
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, seconds, images, own in ((1, 7.0, 200, waits[:1]), (3, 3.0, 300, waits[1:])):
            line = {"split": "train", "step": step, "epoch": 1.0, "loss": 1.0, "seconds": seconds}
            line |= {"wait_seconds": sum(own), "step_wait_seconds": own}
            file.write(json.dumps(line | {"images_per_second": images / seconds}) + "\n")
    summary = results_of(metrics_of(tmp_path))
    assert summary["wait_share"] == pytest.approx(sum(waits) / 10, abs=1e-4)
    assert summary["startup_seconds"] == waits[0]
    assert summary["steady_wait_share"] == pytest.approx(share, abs=1e-4)
    monkeypatch.setattr(closing, "measure_input_times", lambda _: FAST)
    loader = {"backend": "dali-cpu", "threads": 2, "cores": 2, "transform": Transform(32, 32)}
    advice = closing.input_advice(summary, SimpleNamespace(**loader), JOB)
    assert (len(advice) > 1) == advised
    if advised:  # the model's own rate does not depend on when it waited
        assert f" {500 / (10 - sum(waits)):,.0f}" in advice[0]


FACTS = {"images_per_second": 500, "wait_share": 0.5, "backend": "dali-cpu", "threads": 2}
FACTS |= {"cores": 8, "on_gpu": False}
SLOW_DISK = {"read_seconds": 2e-3}
LARGE = {"smaller_decode_seconds": 5e-4, "side": 500.0}
SHARDS = "shards: webdataset"
THREADS, ON_GPU = "threads: data.threads=3", "decoding on the GPU: data.backend=dali-gpu"


@pytest.mark.parametrize(
    ("times", "facts", "remedies"),
    [
        # 1,000 images/s are wanted: 2 threads make just that many, 3 do with room to spare
        ({}, {}, [THREADS]),
        ({}, {"images_per_second": 50}, ["reading and decoding are fast: data.prefetch=8"]),
        ({**SLOW_DISK, "decode_seconds": 1e-4, "transform_seconds": 1e-4}, {}, [SHARDS]),
        ({}, {"cores": 2, "on_gpu": True}, [ON_GPU, "cores: needs 3"]),
        ({}, {"backend": "torchvision"}, [THREADS, "a faster decoder: data.backend=auto"]),
        (LARGE, {"cores": 2}, ["smaller files: --resize 336", "cores: needs 3"]),
        (SLOW_DISK, {}, [SHARDS, THREADS]),
        # which DALI refuses
        ({}, {"cores": 2, "on_gpu": True, "auto_augment": "ra-m7-n2"}, ["cores: needs 3"]),
    ],
)
def test_advice_follows_from_the_stage_that_is_too_slow(times, facts, remedies):
    """Remedies by what they are, with the keys that they set or the options of the files."""
    line, *found = stall_advice(replace(FAST, **times), **{**FACTS, **facts})
    assert line.startswith("an image takes ")
    for text, remedy in zip(found, remedies, strict=True):
        what, how = remedy.split(": ")
        assert text.startswith(what)
        assert how in text
