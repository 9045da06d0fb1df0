"""Pillow opens images of the formats that are read, and starts no other program."""

import os
import re

import numpy as np
import pytest

from largebatch.pipeline import ImageFolder, Loader, Transform, check_data
from largebatch.pipeline.decode.header import image_size
from largebatch.pipeline.decode.pillow import as_png, check_header, decode
from largebatch.pipeline.prepare.shrink import shrink
from tests.test_house import PRODUCT, ROOT

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99 99\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder on PATH with a Ghostscript that notes that it was started."""
    bin_, started = tmp_path / "bin", tmp_path / "started"
    bin_.mkdir()
    for name in ("gs", "gswin32c", "gswin64c"):
        (bin_ / name).write_text(f"#!/bin/sh\necho x >> {started}\n")
        (bin_ / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}{os.pathsep}{os.environ['PATH']}")
    return started


def test_an_eps_file_is_no_image_and_starts_no_program(programs, photos, tmp_path):
    content = np.frombuffer(EPS, np.uint8)
    for use in (decode, check_header, as_png, image_size, lambda _: shrink(EPS, 8, 90)):
        with pytest.raises(ValueError, match="it is in none of the formats JPEG, PNG, "):
            use(content)
    folder = tmp_path / "data" / "train" / "a"
    folder.mkdir(parents=True)
    (folder / "x.jpg").write_bytes(EPS)
    (bad,) = check_data(tmp_path / "data").corrupt
    assert bad.name == str(folder / "x.jpg")
    (folder / "y.jpg").symlink_to(photos / "train" / "ant" / "000.JPEG")
    source = ImageFolder(tmp_path / "data")
    for backend in ("torchvision", "auto"):
        options = {"batch_size": 2, "epochs": 1, "backend": backend, "on_error": "skip"}
        loader = Loader(source, Transform(image_size=8), **options)
        assert len(list(loader)) == 1
        assert [*loader.skipped] == [str(folder / "x.jpg")]
    assert not programs.exists()


# Pillow's ``open``, and imports that would let it be called by another name.
OPEN = re.compile(r"\bImage\.open\b|\bPIL\.Image\b|\bPIL import (.*\bImage as\b|\*|\()")


def test_one_function_opens_images_with_pillow():
    found = [
        str(path.relative_to(ROOT))
        for folder in PRODUCT
        for path in sorted((ROOT / folder).rglob("*.py"))
        for _ in OPEN.findall(path.read_text())
    ]
    assert found == ["pipeline/decode/pillow.py"], f"{found}; valid: decode.pillow.open_image"
