"""Each script of benchmarks/pipeline runs on a few photographs and writes its table."""

import json
import tarfile

import pytest
import timm.data
import torch
from torch.utils.data import DataLoader

from benchmarks import tables
from benchmarks.pipeline import damaged_images, input_contenders
from benchmarks.pipeline import input as input_script
from benchmarks.pipeline.mutations import JPEG, PNG
from benchmarks.pipeline.odd_images import encode, picture

RESULTS = tables.RESULTS


@pytest.fixture
def sample(tmp_path):
    """An archive of five photographs, larger than a crop."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    for seed in range(5):
        image = encode(picture(300 + 20 * seed, 280, seed), "JPEG", quality=92)
        (folder / f"{seed}.JPEG").write_bytes(image)
    archive = tmp_path / "sample.tar"
    with tarfile.open(archive, "w") as file:
        file.add(folder, ".")
    return archive


def test_the_table_of_damaged_images_is_the_stored_one():
    content = json.loads((RESULTS / "damaged_images.json").read_text())
    assert damaged_images.table(content) == (RESULTS / "damaged_images.md").read_text()


def test_damage_is_detected(sample, monkeypatch):
    kinds = {"JPEG": dict([*JPEG.items()][:1]), "PROGRESSIVE": {}, "PNG": dict([*PNG.items()][:1])}
    for name, value in kinds.items():
        monkeypatch.setattr(damaged_images, name, value)
    found = damaged_images.detection(damaged_images._read_tar(sample)[:2], seed=0)
    assert [row["kind"] for row in found["kinds"]] == [*kinds["JPEG"], *kinds["PNG"]]
    assert all(row["mutants"] == 2 for row in found["kinds"])
    assert all(row["wrong_unseen"] + row["strict"] >= row["wrong"] for row in found["kinds"])


def test_the_tables_of_the_input_are_the_stored_ones():
    content = json.loads((RESULTS / "input.json").read_text())
    for name, text in input_script.rendered(content).items():
        assert text == (RESULTS / f"{name}.md").read_text()


def without_workers(*arguments, make=DataLoader, **options):
    """Return a loader that works in this process: a fork of one with threads may deadlock."""
    for name in ("num_workers", "prefetch_factor", "persistent_workers"):
        options.pop(name, None)
    return make(*arguments, **options)


def test_the_contenders_of_the_input(sample, tmp_path, run_script, cells_of, monkeypatch):
    """Measurements are made in this process, each setting of a contender once."""
    monkeypatch.setattr(input_contenders.os, "sched_setaffinity", lambda *_: None)
    # timm makes subclasses of the original when it is first imported.
    assert issubclass(timm.data.loader.MultiEpochsDataLoader, DataLoader)
    monkeypatch.setattr(torch.utils.data, "DataLoader", without_workers)
    made = {}

    def run(**options):
        key = options["contender"], options.get("backend"), options.get("decoder")
        if key not in made:
            few = {"batch": 2, "warm_up": 0, "batches": 1, "step_seconds": 0.0}
            made[key] = input_contenders.measure(options | few)
        return made[key]

    options = ("--sample", sample, "--cores", 2, "--repeats", 1, "--out", tmp_path)
    written = run_script(input_script, *options, IMAGES=5, run=run)
    rows = cells_of(written["input"])
    assert {row[1].partition(" (")[0] for row in rows[:6]} >= {"ours", *input_script.RIVALS}
    assert all(float(row[2].replace(",", "")) > 0 for row in rows[:6])
    assert len(cells_of(written["input_backends"])) == len(input_script.KINDS)
