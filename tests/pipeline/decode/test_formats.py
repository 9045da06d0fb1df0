"""Pillow opens images of the formats that are read, and starts no other program."""

import ast
import os

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


def opens(tree):
    """The calls of Pillow's ``open`` by whatever name, as their nodes."""
    modules, functions = {"PIL.Image"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {n.asname for n in node.names if n.name == "PIL.Image" and n.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "PIL":
            modules |= {n.asname or n.name for n in node.names if n.name == "Image"}
        elif isinstance(node, ast.ImportFrom) and node.module == "PIL.Image":
            functions |= {n.asname or n.name for n in node.names if n.name == "open"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "open":
            if ast.unparse(node.value) in modules:
                yield node
        elif isinstance(node, ast.Name) and node.id in functions:
            yield node


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("from PIL import Image\nImage.open(x)", 1),
        ("from PIL import Image as I\nmap(I.open, x)", 1),
        ("import PIL.Image\nPIL.Image.open(x)", 1),
        ("import PIL.Image as P\nP.open(x)", 1),
        ("from PIL.Image import open as o\no(x)", 1),
        ("from pathlib import Path\nPath().open(); open(x)", 0),
    ],
)
def test_calls_of_open_are_found_by_any_name(text, count):
    assert len([*opens(ast.parse(text))]) == count


def test_one_function_opens_images_with_pillow():
    found = [
        str(path.relative_to(ROOT))
        for folder in PRODUCT
        for path in sorted((ROOT / folder).rglob("*.py"))
        for _ in opens(ast.parse(path.read_text()))
    ]
    assert found == ["pipeline/decode/pillow.py"], f"{found}; valid: decode.pillow.open_image"
