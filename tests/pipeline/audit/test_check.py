"""The findings of ``check_data`` in data sets with faults of every kind."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from largebatch.pipeline import Output, check_data, prepare_folder
from largebatch.pipeline.audit import Spread
from largebatch.pipeline.audit.examine import examine
from tests.conftest import refused
from tests.pipeline.decode import corpus
from tests.pipeline.decode.corpus import encode
from tests.pipeline.formats import SHARDS


@pytest.mark.parametrize("form", ["folder", *SHARDS])
def test_counts_and_sizes_are_those_of_pillow(stored, photos, form):
    found = check_data(stored / form)
    assert found.usable
    assert [split.name for split in found.splits] == ["train", "val"]
    train, val = found.splits
    assert (train.format, train.images, train.classes) == (form, 53, 3)
    assert train.shards == (0 if form == "folder" else 3)
    assert (train.per_class, val.per_class) == (Spread(16, 17, 20), Spread(1, 9, 13))
    files = list((photos / "train").rglob("*.JPEG"))
    sizes = np.array([Image.open(path).size for path in files])
    lengths = [path.stat().st_size for path in files]
    spreads = train.width, train.height, train.image_bytes
    for spread, wanted in zip(spreads, (*sizes.T, lengths), strict=True):
        assert spread == Spread(min(wanted), np.median(wanted), max(wanted))
    assert train.bytes == sum(lengths)
    assert train.kinds == {"JPEG RGB": 53}
    assert [found.repeated, found.misnamed, found.unusual, found.turned, found.others] == [[]] * 5
    (alone,) = check_data(stored / form / "val").splits
    assert (alone.name, alone.images) == ("val", 23)


SMALL = Image.new("RGB", (9, 7), "red")
MORE = {"save_all": True, "append_images": [Image.new("RGB", (9, 7), "blue")]}


def deep_png(channels, colours):
    return corpus.png(np.zeros((7, 9, channels), int), 16, colours)


def ycck():
    """Encode a CMYK JPEG whose Adobe marker declares the YCCK transform."""
    content = encode(SMALL.convert("CMYK"), "JPEG")
    at = content.index(b"Adobe") + 11
    assert content[at] == 0
    return content[:at] + b"\2" + content[at + 1 :]


KINDS = {
    "JPEG RGB": encode(SMALL, "JPEG"),
    "JPEG grey": encode(SMALL.convert("L"), "JPEG"),
    "JPEG CMYK": encode(SMALL.convert("CMYK"), "JPEG"),
    "JPEG YCCK": ycck(),
    "PNG RGB": encode(SMALL, "PNG"),
    "PNG grey": encode(SMALL.convert("L"), "PNG"),
    "PNG palette": encode(SMALL.convert("P"), "PNG"),
    "PNG RGB, alpha": encode(SMALL.convert("RGBA"), "PNG"),
    "PNG black and white": encode(SMALL.convert("1"), "PNG"),
    "PNG 16-bit grey": deep_png(1, 0),
    "PNG 16-bit RGB": deep_png(3, 2),
    "PNG RGB, animated": encode(SMALL, "PNG", **MORE),
    "GIF palette": encode(SMALL, "GIF"),
    "WEBP RGB": encode(SMALL, "WEBP"),
    "WEBP RGB, animated": encode(SMALL, "WEBP", **MORE),
    "BMP RGB": encode(SMALL, "BMP"),
    "TIFF RGB": encode(SMALL, "TIFF"),
}


def test_kinds_of_images_are_recognised():
    for kind, content in KINDS.items():
        seen = examine(np.frombuffer(content, np.uint8))
        assert (seen.kind, seen.width, seen.height, seen.turned) == (kind, 9, 7, False)
        assert seen.format == kind.split()[0]


@pytest.fixture
def data(photos, tmp_path):
    """A copy of the photos."""
    return shutil.copytree(photos, tmp_path / "data")


def short(findings):
    return [(Path(finding.name).name, finding.what) for finding in findings]


PHOTO = encode(
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)), "JPEG"
)
BROKEN = {
    "empty.jpeg": (b"", "it is empty"),
    "html.jpeg": (b"<html>not here</html>", "it is in none of the formats JPEG, PNG, "),
    "cut.jpeg": (PHOTO[: len(PHOTO) // 2], "image file is truncated"),
    "head.jpeg": (PHOTO[:100], ""),
    "cut.png": (encode(Image.radial_gradient("L"), "PNG")[:900], ""),
    "huge.bmp": (b"BM" + bytes(40), ""),
}


def test_undecodable_and_damaged_images_are_named_with_the_reason(data):
    for name, (content, _) in BROKEN.items():
        (data / "train" / "bee" / name).write_bytes(content)
    cut = PHOTO[: len(PHOTO) // 2] + b"\xff\xd9"
    (data / "val" / "ant" / "cut.jpg").write_bytes(cut)
    (data / "val" / "ant" / "tail.png").write_bytes(encode(SMALL, "PNG")[:-12])
    found = check_data(data)
    assert not found.usable
    assert [split.images for split in found.splits] == [53 + len(BROKEN), 25]
    assert [split.kinds for split in found.splits] == [
        {"JPEG RGB": 53},
        {"JPEG RGB": 24, "PNG RGB": 1},
    ]
    reasons = dict(short(found.corrupt))
    assert reasons.keys() == BROKEN.keys()
    assert all(what and what.startswith(BROKEN[name][1]) for name, what in reasons.items())
    assert short(found.damaged) == [
        ("cut.jpg", "Corrupt JPEG data: premature end of data segment"),
        ("tail.png", "truncated PNG file"),
    ]
    assert [split.damaged for split in found.splits] == [0, 2]


def test_misnamed_unusual_and_other_files_do_not_stop_training(data):
    folder = data / "train" / "bee"
    (folder / "png.JPEG").write_bytes(KINDS["PNG RGB"])
    (folder / "jpeg.png").write_bytes(KINDS["JPEG grey"])
    (folder / "cmyk.jpg").write_bytes(KINDS["JPEG CMYK"])
    (folder / "deep.png").write_bytes(KINDS["PNG 16-bit RGB"])
    for orientation in (1, 3):
        exif = {"exif": corpus.exif(orientation)[4:]}
        (folder / f"turned{orientation}.jpg").write_bytes(encode(SMALL, "JPEG", **exif))
    for path in (folder / "notes.txt", folder / ".hidden.jpeg", data / "train" / "list.csv"):
        path.touch()
    found = check_data(data)
    assert found.usable
    assert short(found.misnamed) == [("jpeg.png", "it is JPEG"), ("png.JPEG", "it is PNG")]
    assert short(found.unusual) == [("cmyk.jpg", "JPEG CMYK"), ("deep.png", "PNG 16-bit RGB")]
    assert found.turned == [str(folder / "turned3.jpg")]
    assert found.splits[0].turned == 1
    others = sorted(Path(name).name for name in found.others)
    assert others == [".hidden.jpeg", "list.csv", "notes.txt"]


@pytest.mark.parametrize("form", ["folder", "webdataset"])
def test_repeated_images_are_found_in_all_classes_and_splits(data, tmp_path, form):
    for source, copy in (
        ("train/ant/000", "train/ant/again"),
        ("train/ant/001", "train/bee/again"),
        ("train/ant/002", "val/ant/again"),
        ("train/ant/003", "val/cat/again"),
        ("train/ant/003", "train/cat/again"),
    ):
        shutil.copy(data / f"{source}.JPEG", data / f"{copy}.JPEG")
    if form != "folder":
        prepare_folder(tmp_path / "shards", data, Output(form, images_per_shard=9))
        data = tmp_path / "shards"
    found = check_data(data)
    assert found.usable
    assert sorted((r.classes, r.splits, len(r.names)) for r in found.repeated) == [
        (["ant"], ["train"], 2),
        (["ant"], ["train", "val"], 2),
        (["ant", "bee"], ["train"], 2),
        (["ant", "cat"], ["train", "val"], 3),
    ]
    same = next(r for r in found.repeated if r.classes == ["ant"] and r.splits == ["train"])
    assert sorted(Path(name).stem for name in same.names) == ["000", "again"]


HARM = {
    "cut": "has 35,840 bytes, but 71,680 in ",
    "end": "is damaged: neither a file of the tar nor its end follows",
    "image": "its bytes are not those that the index was made of",
    "gone": "is missing (1 of 3 shards of ",
}


@pytest.mark.parametrize("harm", HARM)
def test_shards_are_compared_with_their_index(stored, tmp_path, harm):
    root = shutil.copytree(stored / "webdataset", tmp_path / "data")
    path = root / "train" / "train-00000.tar"
    if harm == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif harm == "gone":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[1000 if harm == "image" else -1] ^= 1
        path.write_bytes(content)
    found = check_data(root)
    assert not found.usable
    assert HARM[harm] in found.corrupt[0].what
    assert all(f.name.startswith(str(path)) for f in found.corrupt)
    # The images beyond a cut are reported as well.
    assert len(found.corrupt) > 5 if harm == "cut" else len(found.corrupt) == 1
    assert found.splits[0].images == 53


def test_a_folder_that_is_not_a_data_set_is_refused(tmp_path, stored):
    refused(r"no folder .*/nowhere; valid: a data set", check_data, tmp_path / "nowhere")
    refused("holds no data set; valid: train/<class>/<image>", check_data, tmp_path)
    root = shutil.copytree(stored / "webdataset", tmp_path / "data")
    (root / "val" / "index.npz").write_bytes(b"no index")
    refused("val/index.npz is not an index of shards", check_data, root)
    (root / "val" / "index.npz").unlink()
    refused("val has shards, such as val-.*tar, but no index.npz: write", check_data, root)
