"""The findings of ``check_data`` in data sets with faults of every kind."""

import io
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from largebatch.pipeline import DataError, Output, Progress, check_data, prepare_folder
from largebatch.pipeline.audit.examine import examine
from largebatch.pipeline.sources import EXTENSIONS
from tests.conftest import write_images
from tests.pipeline.formats import write_data_set

FORMATS = ("folder", "webdataset", "tfrecord", "recordio")


@pytest.fixture(scope="module")
def stored(photos, tmp_path_factory):
    """The photos in each format."""
    root = tmp_path_factory.mktemp("stored")
    (root / "folder").symlink_to(photos)
    for form in FORMATS[1:]:
        write_data_set(form, root / form, photos, images_per_shard=20)
    return root


@pytest.mark.parametrize("form", FORMATS)
def test_counts_and_sizes_are_those_of_pillow(stored, photos, form):
    found = check_data(stored / form)
    assert found.usable
    assert [split.name for split in found.splits] == ["train", "val"]
    train, val = found.splits
    assert (train.format, train.images, train.classes) == (form, 53, 3)
    assert train.shards == (0 if form == "folder" else 3)
    assert (train.per_class.least, train.per_class.median, train.per_class.most) == (16, 17, 20)
    assert (val.per_class.least, val.per_class.median, val.per_class.most) == (1, 9, 13)
    files = list((photos / "train").rglob("*.JPEG"))
    sizes = np.array([Image.open(path).size for path in files])
    lengths = [path.stat().st_size for path in files]
    for spread, wanted in (
        (train.width, sizes[:, 0]),
        (train.height, sizes[:, 1]),
        (train.image_bytes, lengths),
    ):
        assert spread.least == min(wanted)
        assert spread.median == np.median(wanted)
        assert spread.most == max(wanted)
    assert train.bytes == sum(lengths)
    assert train.kinds == {"JPEG RGB": 53}
    for nothing in (found.repeated, found.misnamed, found.unusual, found.turned, found.others):
        assert nothing == []


def test_one_split_can_be_checked_alone(stored):
    for form in ("folder", "webdataset"):
        found = check_data(stored / form / "val")
        assert [(split.name, split.images) for split in found.splits] == [("val", 23)]


def encoded(image, form, **options):
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def facts(content):
    return examine(np.frombuffer(content, np.uint8))


SMALL = Image.new("RGB", (9, 7), "red")
FRAMES = [Image.new("RGB", (9, 7), colour) for colour in ("red", "green", "blue")]
TURNED = Image.Exif()
TURNED[0x0112] = 3
UPRIGHT = Image.Exif()
UPRIGHT[0x0112] = 1


def deep_png(colours):
    """Encode a 16-bit PNG, which Pillow does not write in colour."""
    import struct
    import zlib

    def chunk(kind, content):
        crc = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)

    channels = {0: 1, 2: 3}[colours]
    header = struct.pack(">IIBBBBB", 9, 7, 16, colours, 0, 0, 0)
    rows = (b"\0" + bytes(9 * channels * 2)) * 7
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def ycck():
    """Encode a CMYK JPEG whose Adobe marker declares the YCCK transform."""
    content = encoded(SMALL.convert("CMYK"), "JPEG")
    at = content.index(b"Adobe") + 11
    assert content[at] == 0
    return content[:at] + b"\2" + content[at + 1 :]


KINDS = {
    "JPEG RGB": encoded(SMALL, "JPEG"),
    "JPEG grey": encoded(SMALL.convert("L"), "JPEG"),
    "JPEG CMYK": encoded(SMALL.convert("CMYK"), "JPEG"),
    "JPEG YCCK": ycck(),
    "PNG RGB": encoded(SMALL, "PNG"),
    "PNG grey": encoded(SMALL.convert("L"), "PNG"),
    "PNG palette": encoded(SMALL.convert("P"), "PNG"),
    "PNG RGB, alpha": encoded(SMALL.convert("RGBA"), "PNG"),
    "PNG black and white": encoded(SMALL.convert("1"), "PNG"),
    "PNG 16-bit grey": deep_png(0),
    "PNG 16-bit RGB": deep_png(2),
    "PNG RGB, animated": encoded(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]),
    "GIF palette": encoded(SMALL, "GIF"),
    "WEBP RGB": encoded(SMALL, "WEBP"),
    "WEBP RGB, animated": encoded(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]),
    "BMP RGB": encoded(SMALL, "BMP"),
    "TIFF RGB": encoded(SMALL, "TIFF"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_images_are_recognised(kind):
    seen = facts(KINDS[kind])
    assert (seen.kind, seen.width, seen.height, seen.turned) == (kind, 9, 7, False)
    assert seen.format == kind.split()[0]


def test_the_exif_orientation_is_recognised():
    assert facts(encoded(SMALL, "JPEG", exif=TURNED)).turned
    assert not facts(encoded(SMALL, "JPEG", exif=UPRIGHT)).turned


PHOTO = encoded(
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)), "JPEG"
)
BROKEN = {
    "empty.jpeg": (b"", "it is empty"),
    "html.jpeg": (b"<html>not here</html>", "it is in none of the formats JPEG, PNG, "),
    "cut.jpeg": (PHOTO[: len(PHOTO) // 2], "image file is truncated"),
    "head.jpeg": (PHOTO[:100], ""),
    "cut.png": (encoded(Image.radial_gradient("L"), "PNG")[:900], ""),
    "huge.bmp": (b"BM" + bytes(40), ""),
    "folder.jpeg": (None, "cannot be read: it is not a regular file"),
    "gone.jpeg": ("nowhere", "cannot be read: No such file or directory"),
    "circle.jpeg": ("circle.jpeg", "cannot be read: Too many levels of symbolic links"),
}


def test_undecodable_images_are_named_with_the_reason(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "data")
    folder = tmp_path / "data" / "train" / "bee"
    for name, (content, _) in BROKEN.items():
        if content is None:
            (folder / name).mkdir()
        elif isinstance(content, str):
            (folder / name).symlink_to(content)
        else:
            (folder / name).write_bytes(content)
    found = check_data(tmp_path / "data")
    assert not found.usable
    assert found.splits[0].images == 53 + len(BROKEN)
    assert sum(found.splits[0].kinds.values()) == 53
    reasons = {Path(f.name).name: f.what for f in found.corrupt}
    assert reasons.keys() == BROKEN.keys()
    for name, (_, reason) in BROKEN.items():
        assert reasons[name].startswith(reason), name
        assert reasons[name]


def test_damaged_images_are_counted_and_named_apart_from_undecodable_ones(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "data")
    folder = tmp_path / "data" / "val" / "ant"
    (folder / "cut.jpg").write_bytes(PHOTO[: len(PHOTO) // 2] + b"\xff\xd9")
    (folder / "tail.png").write_bytes(encoded(SMALL, "PNG")[:-12])
    (folder / "broken.jpg").write_bytes(PHOTO[:400])
    found = check_data(tmp_path / "data")
    assert not found.usable
    assert [(Path(f.name).name, f.what) for f in found.damaged] == [
        ("cut.jpg", "Corrupt JPEG data: premature end of data segment"),
        ("tail.png", "truncated PNG file"),
    ]
    assert [Path(f.name).name for f in found.corrupt] == ["broken.jpg"]
    assert [split.damaged for split in found.splits] == [0, 2]
    assert found.splits[1].kinds == {"JPEG RGB": 24, "PNG RGB": 1}
    (folder / "broken.jpg").unlink()
    found = check_data(tmp_path / "data")
    assert not found.usable
    assert found.corrupt == []


def test_a_missing_package_is_named(photos, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"data check needs simplejpeg, .*: pip install 'largebat"):
        check_data(photos)


def test_misnamed_unusual_and_other_files_do_not_stop_training(photos, tmp_path):
    root = tmp_path / "data"
    shutil.copytree(photos, root)
    folder = root / "train" / "bee"
    (folder / "png.JPEG").write_bytes(KINDS["PNG RGB"])
    (folder / "jpeg.png").write_bytes(KINDS["JPEG grey"])
    (folder / "cmyk.jpg").write_bytes(KINDS["JPEG CMYK"])
    (folder / "deep.png").write_bytes(KINDS["PNG 16-bit RGB"])
    (folder / "turned.jpg").write_bytes(encoded(SMALL, "JPEG", exif=TURNED))
    (folder / "notes.txt").touch()
    (folder / ".hidden.jpeg").touch()
    (root / "train" / "list.csv").touch()
    found = check_data(root)
    assert found.usable
    short = [(Path(f.name).name, f.what) for f in found.misnamed]
    assert short == [("jpeg.png", "it is JPEG"), ("png.JPEG", "it is PNG")]
    assert [(Path(f.name).name, f.what) for f in found.unusual] == [
        ("cmyk.jpg", "JPEG CMYK"),
        ("deep.png", "PNG 16-bit RGB"),
    ]
    assert found.turned == [str(folder / "turned.jpg")]
    assert found.splits[0].turned == 1
    assert sorted(Path(name).name for name in found.others) == [
        ".hidden.jpeg",
        "list.csv",
        "notes.txt",
    ]


@pytest.mark.parametrize("form", ["folder", "webdataset"])
def test_repeated_images_are_found_in_all_classes_and_splits(photos, tmp_path, form):
    root = tmp_path / "data"
    shutil.copytree(photos, root)
    for source, copy in (
        ("train/ant/000", "train/ant/again"),
        ("train/ant/001", "train/bee/again"),
        ("train/ant/002", "val/ant/again"),
        ("train/ant/003", "val/cat/again"),
        ("train/ant/003", "train/cat/again"),
    ):
        shutil.copy(root / f"{source}.JPEG", root / f"{copy}.JPEG")
    if form != "folder":
        prepare_folder(tmp_path / "shards", root, Output(form, images_per_shard=9))
        root = tmp_path / "shards"
    found = check_data(root)
    assert found.usable
    assert sorted((r.classes, r.splits, len(r.names)) for r in found.repeated) == [
        (["ant"], ["train"], 2),
        (["ant"], ["train", "val"], 2),
        (["ant", "bee"], ["train"], 2),
        (["ant", "cat"], ["train", "val"], 3),
    ]
    same = next(r for r in found.repeated if r.classes == ["ant"] and r.splits == ["train"])
    assert sorted(Path(name).stem for name in same.names) == ["000", "again"]


def test_classes_that_training_refuses_are_reported(photos, tmp_path):
    root = tmp_path / "data"
    shutil.copytree(photos, root)
    (root / "train" / "empty").mkdir()
    write_images(root / "val", {"zebra": 1})
    found = check_data(root)
    assert not found.usable
    assert [(f.name, f.what) for f in found.corrupt] == [
        (
            f"{root}/train/empty",
            f"has no images ({', '.join(EXTENSIONS)}): add images or remove the folder",
        ),
        (f"{root}/val/zebra", "is not a class of the training images (4 classes, ant to empty)"),
    ]


HARM = {
    "cut": "has 35,840 bytes, but 71,680 in ",
    "changed": "has another SHA-256 checksum than in its index",
    "gone": "is missing (1 of 3 shards of ",
}


@pytest.mark.parametrize("harm", HARM)
def test_shards_are_compared_with_their_index(stored, tmp_path, harm):
    root = tmp_path / "data"
    shutil.copytree(stored / "webdataset", root)
    path = root / "train" / "train-00000.tar"
    if harm == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif harm == "changed":
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    found = check_data(root)
    assert not found.usable
    assert found.corrupt[0].name == str(path)
    assert any(HARM[harm] in finding.what for finding in found.corrupt)
    if harm == "cut":  # the images beyond the cut are reported as well
        assert len(found.corrupt) > 5
        assert all(f"{path}:" in f.name for f in found.corrupt[1:])
    else:
        assert {f.name for f in found.corrupt} == {str(path)}
    assert found.splits[0].images == 53


def test_images_in_shards_are_decoded(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "data")
    (tmp_path / "data" / "train" / "cat" / "bad.JPEG").write_bytes(PHOTO[:300])
    write_data_set("recordio", tmp_path / "shards", tmp_path / "data", images_per_shard=100)
    found = check_data(tmp_path / "shards")
    (bad,) = found.corrupt
    assert bad.name == f"{tmp_path}/shards/train/train-00000.rec:cat/bad.JPEG"


def test_progress_is_reported_and_the_number_of_threads_has_no_effect(stored):
    reported: list[Progress] = []
    one = check_data(stored / "tfrecord", workers=1, report=reported.append)
    assert one == check_data(stored / "tfrecord", workers=4)
    assert [p.what for p in reported[:1]] == ["checking train"]
    ends = {p.what: (p.images, p.bytes, p.total_images, p.total_bytes) for p in reported}
    assert [ends[f"checking {split.name}"] for split in one.splits] == [
        (split.images, split.bytes, split.images, split.bytes) for split in one.splits
    ]


def test_a_folder_that_is_not_a_data_set_is_refused(tmp_path, stored):
    with pytest.raises(DataError, match=r"no folder .*/nowhere; valid: a data set"):
        check_data(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no data set; valid: train/<class>/<image>"):
        check_data(tmp_path)
    shutil.copytree(stored / "webdataset", tmp_path / "data")
    (tmp_path / "data" / "val" / "index.npz").write_bytes(b"no index")
    with pytest.raises(DataError, match=r"val/index.npz is not an index of shards"):
        check_data(tmp_path / "data")
    (tmp_path / "data" / "val" / "index.npz").unlink()
    with pytest.raises(
        DataError, match=r"val has shards, such as val-.*tar, but no index.npz: write"
    ):
        check_data(tmp_path / "data")
