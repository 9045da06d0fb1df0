"""The part about decoding: its images, and what it does where a decoder is not installed."""

import os

import pytest
import torch

from benchmarks.gpu import dali
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Report, write


def test_images_have_the_bytes_per_pixel_of_imagenet(tmp_path):
    dali.write_images(tmp_path, 8, dali.SIZE)
    sizes = [os.path.getsize(path) for path in tmp_path.rglob("*.JPEG")]
    assert len(sizes) == 8
    width, height = dali.SIZE
    assert sum(sizes) / (8 * width * height) == pytest.approx(dali.BYTES_PER_PIXEL, rel=0.05)


@pytest.mark.parametrize("there", [True, False])
def test_a_contender_that_is_not_installed_is_skipped(tmp_path, monkeypatch, there):
    if not there:
        monkeypatch.setattr(dali, "installed", lambda module: module == "torchvision")
    file = tmp_path / "results.json"
    write(file, {"parts": {}})
    report = Report(file, "dali", dali.TITLE, 60)
    dali.run(report, Place(torch.device("cpu"), dry=True))
    assert report.content["checks"] == []
    [rows] = report.content["tables"].values()
    reasons = {skip["what"]: skip["reason"] for skip in report.content["skipped"]}
    assert {row["contender"] for row in rows} | {*reasons} >= {*dali.CONTENDERS}
    assert {name for name in dali.CONTENDERS if reasons.get(name) == "needs CUDA"} == {
        name for name, options in dali.CONTENDERS.items() if options["backend"] == "dali-gpu"
    }
    assert ("needs nvidia.nvimgcodec" in reasons.values()) == (not there)
    assert all(row["images_per_second"] > 0 for row in rows)
