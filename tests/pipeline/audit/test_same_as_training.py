"""``data check`` says what training will do, for folders as people have them."""

import io
import itertools
import json
import os
import re
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from largebatch.pipeline import (
    DataError,
    ImageFolder,
    LeftOut,
    Output,
    check_data,
    prepare_folder,
    printable,
)
from largebatch.recipes.commands.data_check import print_summary
from tests.conftest import SPECIAL, refused

HIDDEN = (".ipynb_checkpoints", "@eaDir", "__MACOSX", "lost+found", "$RECYCLE.BIN", ".git")
HIDDEN += ("System Volume Information", "#recycle", "@Recycle", "__pycache__")


@pytest.fixture(scope="module")
def image(photos):
    return (photos / "train" / "ant" / "000.JPEG").read_bytes()


def put(path, content):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


def data_set(root, image, classes=("a", "b")):
    for split in ("train", "val"):
        for name in classes:
            put(root / split / name / "x.jpg", image)
    return root


def hidden(folder, image):
    for name in HIDDEN:
        put(folder / name / "x.jpg", image)
        put(folder / "a" / name / "x.jpg", image)


# What is put into train or val, by name, and whether training refuses it, names it or is silent.
ODD = {
    "hidden folders": (hidden, "silent"),
    "hidden files": (lambda f, image: put(f / "a" / "._x.jpg", image), "silent"),
    "other files": (lambda f, image: put(f / "a" / "notes.txt", image), "silent"),
    "file beside classes": (lambda f, image: put(f / "labels.txt", image), "silent"),
    "empty folder in a class": (lambda f, image: (f / "a" / "more").mkdir(), "silent"),
    "link in a class": (lambda f, image: (f / "a" / "gone").symlink_to("nowhere"), "silent"),
    "stray": (lambda f, image: put(f / "y.jpg", image), "named"),
    "stray, unread": (lambda f, image: put(f / "y.TIF", image), "named"),
    "nested": (lambda f, image: put(f / "a" / "more" / "deep" / "y.jpg", image), "named"),
    "nested behind a link": (lambda f, image: (f / "a" / "c").symlink_to(f / "b"), "named"),
    **{
        name: (lambda f, image, name=name: put(f / "a" / f"y.{name}", image), "named")
        for name in ("gif", "jfif", "jpe", "tif", "tiff", "HEIC", "jp2", "ppm")
    },
    "class nested deeper": (lambda f, image: put(f / "c" / "cat" / "y.jpg", image), "refused"),
    "class of unread images": (lambda f, image: put(f / "c" / "y.gif", image), "refused"),
    "empty class": (lambda f, image: (f / "c").mkdir(), "refused"),
    "class of validation alone": (lambda f, image: put(f / "c" / "y.jpg", image), "refused"),
    "link to nothing": (lambda f, image: (f / "c").symlink_to("/mnt/not-mounted/c"), "refused"),
    "link to itself": (lambda f, image: (f / "c").symlink_to("c"), "refused"),
}


def training(root):
    """Return what training says, and the images that it uses; a refusal gives None for them."""
    left_out = LeftOut()
    try:
        train = ImageFolder(root, "train", on_fault=left_out)
        val = ImageFolder(root, "val", train.classes, left_out)
    except DataError as error:
        return str(error), None
    return left_out.line(), {"train": train, "val": val}


@pytest.mark.parametrize(
    ("name", "split"), [*zip(ODD, itertools.cycle(["train", "val"]), strict=False)]
)
def test_check_passes_where_training_uses_every_image(tmp_path, image, name, split):
    make, expected = ODD[name]
    root = data_set(tmp_path, image)
    make(root / split, image)
    said, used = training(root)
    found = check_data(root)
    assert {"silent": found.usable, "named": bool(found.left_out), "refused": bool(found.corrupt)}[
        expected
    ]
    assert found.usable == (expected == "silent")
    assert "\n" not in said
    assert (used is None) == (expected == "refused")
    if used is None:
        assert str(root / split) in said
        return
    assert {part.classes for part in used.values()} == {("a", "b")}
    assert {split.name: split.images for split in found.splits} == {"train": 2, "val": 2}
    line = f"not in the data: .*: {len(HIDDEN) if name == 'hidden folders' else 1}, such as {root}/"
    wanted = expected == "named" or name == "hidden folders"
    assert bool(re.match(line, said)) == wanted, said
    if not wanted:
        assert said == ""


def test_a_validation_set_that_is_not_sorted_into_classes_is_refused(tmp_path, image):
    root = data_set(tmp_path, image)
    shutil.rmtree(root / "val")
    for number in range(3):
        put(root / "val" / f"{number}.JPEG", image)
    said, used = training(root)
    assert used is None
    assert f"{root}/val has no class folders, but 3 images; valid: " in said
    found = check_data(root)
    assert [f.name for f in found.corrupt] == [f"{root}/val"]
    assert len(found.left_out) == 3
    shutil.rmtree(root / "val")
    (root / "val").symlink_to("nowhere")
    assert [f.name for f in check_data(root).corrupt] == [f"{root}/val"]


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_regular_file_of_an_image_is_named_and_not_read(tmp_path, image, kind):
    root = data_set(tmp_path, image)
    path = root / "train" / "a" / "odd.jpg"
    SPECIAL[kind](path)
    _, used = training(root)
    (error,) = used["train"].read(np.array([0]))
    assert used["train"].name(0) == str(path)
    assert str(error).startswith(f"{path} cannot be read: ")
    assert [f.name for f in check_data(root).corrupt] == [str(path)]
    message = f"{path} cannot be read: "
    refused(message, prepare_folder, tmp_path / "out", root, Output("webdataset"))


# Names of files are any bytes; these need care.
ODD_NAMES = {b"plain", b"caf\xe9", b"a\nb", b"\x1b[31mred", b"%0A \\", b".x"}
ODD_NAMES |= {"\u202e\u3000é".encode()}


def test_names_of_any_bytes_are_told_alike_and_can_be_printed(image, tmp_path):
    root = tmp_path / "data"
    for split, name, file in itertools.product((b"train", b"val"), ODD_NAMES, ODD_NAMES):
        put(b"/".join((os.fsencode(root), split, name, file + b".jpg")), image)
    shown = [os.fsdecode(name) for name in ODD_NAMES - {b".x"}]
    said, used = training(root)
    source = used["train"]
    wanted = {f"{root}/train/{c}/{f}.jpg" for c in shown for f in shown}
    assert {source.path(i) for i in range(len(source))} == wanted
    assert source.fingerprint == used["val"].fingerprint  # which are alike
    found = check_data(root)
    assert [split.images for split in found.splits] == [len(source), len(used["val"])]
    assert found.usable
    names = found.repeated[0].names
    assert f"{root}/train/caf%E9/a%0Ab.jpg" in names
    assert names[: len(wanted)] == [source.name(i) for i in range(len(source))]
    text = io.StringIO()
    print_summary(found, Console(file=text, soft_wrap=True))
    texts = [said, *source.classes, *names, *text.getvalue().split("\n")]
    assert [text for text in texts if not text.isprintable()] == []
    json.dumps(found.as_json(), ensure_ascii=False).encode()


@given(st.text(st.characters(exclude_categories=())))
def test_printable_text_can_be_printed_and_is_left_alone(text):
    once = printable(text)
    assert once.isprintable()
    assert printable(once) == once.encode().decode() == once
    assert once == text or not text.isprintable()
