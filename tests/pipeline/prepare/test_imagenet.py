"""ImageNet, from small archives in the format of the official ones."""

import io
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.io import savemat
from torchvision.datasets.imagenet import parse_devkit_archive

from largebatch.pipeline import DataError, ImageFolder, Output, prepare_imagenet
from largebatch.pipeline.prepare import imagenet
from largebatch.pipeline.sources import INDEX_FILE, Index

# In the order of the development kit, which is not sorted.
SYNSETS = ["n02119789", "n01440764", "n02100735"]
ABOVE = "n00001740"
PER_CLASS = {"n01440764": 4, "n02100735": 9, "n02119789": 6}
VAL = [0, 1, 1, 2, 0, 2, 2, 1]  # classes of the validation images, by place in SYNSETS


def image(seed):
    """Return bytes with the signature of a JPEG file; these tests decode nothing."""
    size = int(np.random.default_rng(seed).integers(100, 2000))
    return b"\xff\xd8\xff" + np.random.default_rng(seed).bytes(size)


def add(archive, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("imagenet")
    with tarfile.open(folder / "train.tar", "w") as outer:
        for synset in ("n02119789", "n01440764", "n02100735"):
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as archive:
                for i in range(PER_CLASS[synset]):
                    name = f"{synset}_{i * 17}.JPEG"
                    add(archive, name, image(hash_of(name)))
            add(outer, f"{synset}.tar", inner.getvalue())
    with tarfile.open(folder / "val.tar", "w") as archive:
        for number in (3, 1, 2, 4, 5, 6, 8, 7):  # not in order
            name = f"ILSVRC2012_val_{number:08d}.JPEG"
            add(archive, name, image(hash_of(name)))
    (folder / "labels.txt").write_text("".join(f"{SYNSETS[i]}\n" for i in VAL))
    boxes = [(f"{SYNSETS[k]} 1 2 30 40 " * (1 + i % 2), i) for i, k in enumerate(VAL, 1)]
    lines = [f"ILSVRC2012_val_{i:08d},{text}" for text, i in reversed(boxes)]
    (folder / "kaggle.csv").write_text("\n".join(["ImageId,PredictionString", *lines, ""]))
    table = np.array(
        [
            (1, SYNSETS[0], "kit fox", "a fox", 0, 0, 0, 1300),
            (2, SYNSETS[1], "tench", "a fish", 0, 0, 0, 1300),
            (3, SYNSETS[2], "setter", "a dog", 0, 0, 0, 1300),
            (4, ABOVE, "entity", "that which is", 3, [1, 2, 3], 4, 0),
        ],
        dtype=[
            (name, object)
            for name in (
                "ILSVRC2012_ID",
                "WNID",
                "words",
                "gloss",
                "num_children",
                "children",
                "wordnet_height",
                "num_train_images",
            )
        ],
    )
    meta = io.BytesIO()
    savemat(meta, {"synsets": table.reshape(-1, 1)})
    with tarfile.open(folder / "devkit.tar.gz", "w:gz") as archive:
        data = "ILSVRC2012_devkit_t12/data"
        add(archive, f"{data}/meta.mat", meta.getvalue())
        truth = "".join(f"{i + 1}\n" for i in VAL).encode()
        add(archive, f"{data}/ILSVRC2012_validation_ground_truth.txt", truth)
    return folder


def hash_of(name):
    return int.from_bytes(name.encode(errors="surrogateescape")[-9:-5], "little")


PARTIAL = {"allow_partial": True, "checksum": False}


def prepare(archives, out, output=None, **options):
    labels = {} if "devkit" in options else {"val_labels": archives / "labels.txt"}
    return prepare_imagenet(
        out, archives / "train.tar", archives / "val.tar", output, **{**labels, **options}
    )


@pytest.mark.parametrize("labels", ["devkit", "val_labels"])
def test_every_image_is_in_the_folder_of_its_class(archives, tmp_path, labels):
    name = {"devkit": "devkit.tar.gz", "val_labels": "labels.txt"}[labels]
    counts = prepare(archives, tmp_path / "out", **{labels: archives / name}, **PARTIAL)
    assert counts == {"train": 19, "val": 8}
    train = ImageFolder(tmp_path / "out", "train")
    val = ImageFolder(tmp_path / "out", "val", train.classes)
    assert train.classes == tuple(sorted(SYNSETS))
    assert np.bincount(train.labels).tolist() == [4, 9, 6]
    names = {val.name(i).rpartition("/")[2]: train.classes[k] for i, k in enumerate(val.labels)}
    assert names == {f"ILSVRC2012_val_{i:08d}.JPEG": SYNSETS[k] for i, k in enumerate(VAL, 1)}
    for source in (train, val):
        for content in source.read(np.arange(len(source))):
            assert content[:3].tobytes() == b"\xff\xd8\xff"
        for i in range(len(source)):
            file = source.name(i).rpartition("/")[2]
            assert source.read(np.array([i]))[0].tobytes() == image(hash_of(file))


def test_the_devkit_is_read_as_torchvision_reads_it(archives, tmp_path):
    parse_devkit_archive(tmp_path, str(make_torchvision_take_it(archives, tmp_path)))
    import torch

    _, theirs = torch.load(tmp_path / "meta.bin")
    numbered = dict(enumerate(theirs, 1))
    assert imagenet.read_devkit(archives / "devkit.tar.gz") == numbered
    assert imagenet.read_synsets(archives / "labels.txt") == numbered
    assert imagenet.read_synsets(archives / "kaggle.csv") == numbered


def make_torchvision_take_it(archives, folder):
    """Turn off torchvision's check that the archive has the official checksum."""
    import torchvision.datasets.imagenet as theirs

    path = folder / "ILSVRC2012_devkit_t12.tar.gz"
    path.write_bytes((archives / "devkit.tar.gz").read_bytes())
    theirs.ARCHIVE_META["devkit"] = (path.name, None)
    return path.name


def test_shards_hold_the_same_images(archives, tmp_path):
    prepare(archives, tmp_path / "out", Output("webdataset", images_per_shard=5), **PARTIAL)
    for split, shards in (("train", 4), ("val", 2)):
        folder = tmp_path / "out" / split
        index = Index.load((folder / INDEX_FILE).read_bytes(), "index")
        assert index.classes == tuple(sorted(SYNSETS))
        assert len(index.shards) == shards
        assert len(list(folder.iterdir())) == 2 * shards + 1
        for i, name in enumerate(index.names):
            content = (folder / index.shards[index.shard[i]]).read_bytes()
            run = content[index.offset[i] :][: index.length[i]]
            assert run == image(hash_of(name.rpartition(".")[0] + ".JPEG"))
            if split == "train":
                assert index.classes[index.labels[i]] == name.rpartition("/")[2][:9]


def test_validation_images_without_training_class_are_left_out(archives, tmp_path):
    with (
        tarfile.open(archives / "train.tar") as whole,
        tarfile.open(tmp_path / "train.tar", "w") as part,
    ):
        for info in whole:
            if info.name != "n02100735.tar":
                part.addfile(info, whole.extractfile(info))
    counts = prepare_imagenet(
        tmp_path / "out",
        tmp_path / "train.tar",
        archives / "val.tar",
        val_labels=archives / "labels.txt",
        **PARTIAL,
    )
    assert counts == {"train": 10, "val": 5}


def test_counts_and_checksums_must_be_the_official_ones(archives, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"val.tar has the MD5 checksum .*, not 29b22e2961454d541"):
        prepare(archives, out)
    with pytest.raises(DataError, match=r"train.tar has 3 classes, not 1,000 \(--allow-partial"):
        prepare(archives, out, checksum=False)
    monkeypatch.setattr(imagenet, "CLASSES", 3)
    with pytest.raises(DataError, match=r"train.tar has 19 images, not 1,281,167 \(--allow-part"):
        prepare(archives, out, checksum=False)
    monkeypatch.setattr(imagenet, "COUNTS", {"train": 19, "val": 50_000})
    with pytest.raises(DataError, match=r"val.tar has 8 images, not 50,000 \(--allow-partial"):
        prepare(archives, out, checksum=False)
    assert not out.exists()


def test_missing_archives_are_named_with_where_to_get_them(archives, tmp_path):
    train, val, out = archives / "train.tar", archives / "val.tar", tmp_path / "out"
    login = r"from https://image-net.org/download-images.php \(log in there first\)"
    with pytest.raises(
        DataError, match=rf"--train-archive is missing: download ILSVRC2012_img_train.tar.* {login}"
    ):
        prepare_imagenet(out, None, val)
    with pytest.raises(DataError, match=r"--val-archive: there is no file nope: download ILSVRC"):
        prepare_imagenet(out, train, "nope")
    with pytest.raises(DataError, match=r"--devkit is missing: download .*, or give --val-labels"):
        prepare_imagenet(out, train, val)
    assert not out.exists()


def test_wrong_archives_are_named(archives, photos, tmp_path):
    train, val, labels = archives / "train.tar", archives / "val.tar", archives / "labels.txt"
    short, odd, empty = tmp_path / "short.txt", tmp_path / "odd.txt", tmp_path / "empty.tar"
    short.write_text("n01440764\n" * 3)
    odd.write_text("n01440764\ntench\n")
    tarfile.open(empty, "w").close()
    for message, arguments in {
        r"--train-archive: .*val.tar holds no archive of a class": (val, val, labels),
        r"--val-archive: .*train.tar holds 'n02119789.tar', not ILSVRC": (train, train, labels),
        r"--val-archive: .*empty.tar has no images of the training classes": (train, empty, labels),
        r"val_0000000\d.JPEG of .* has no class: there are 3 labels": (train, val, short),
        r"--val-labels: line 2 of .*odd.txt is 'tench'; valid: a synset": (train, val, odd),
        r"labels.txt is broken or truncated": (labels, val, labels),
    }.items():
        with pytest.raises(DataError, match=message):
            prepare_imagenet(tmp_path / "out", *arguments[:2], val_labels=arguments[2], **PARTIAL)
    head, row = "ImageId,PredictionString", "ILSVRC2012_val_00000001,n01440764 1 2 3 4"
    for line, message in {
        "n01440764_1,n01440764 1 2 3 4": "line 3 of .*; valid: ILSVRC2012_val_00000001,n01440764 ",
        "ILSVRC2012_val_00000002,": "line 3 of .*; valid: ILSVRC",
        "ILSVRC2012_val_00000002,n01440764 1 2 3": "line 3 of .*; valid: ILSVRC",
        "ILSVRC2012_val_00000002,n01440764 1 2 3 4 n02100735 1 2 3 4": "several of one synset",
        row: "line 3 of .*an image that occurs twice; valid: each image once",
        "": "val_0000000\\d.JPEG of .* has no class: there are 1 labels",
    }.items():
        odd.write_text("\n".join([head, row, line]))
        with pytest.raises(DataError, match=message):
            prepare_imagenet(tmp_path / "out", train, val, val_labels=odd, **PARTIAL)
    with pytest.raises(DataError, match=r"--devkit: .*train.tar is not the development kit"):
        prepare_imagenet(tmp_path / "out", train, val, devkit=train, **PARTIAL)
    assert not (tmp_path / "out").exists()


def with_files(path, copy, *files):
    """Copy an archive, and append files to it."""
    with tarfile.open(path) as whole, tarfile.open(copy, "w") as out:
        for info in whole:
            out.addfile(info, whole.extractfile(info))
        for name, content in files:
            add(out, name, content)
    return copy


def inner(*names):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in names:
            add(archive, name, image(hash_of(name)))
    return content.getvalue()


def test_hidden_files_are_passed_over_and_counted(archives, tmp_path):
    """As the tar of macOS adds them."""
    new = inner("./._n03000000_1.JPEG", "./n03000000_1.JPEG", "__MACOSX/x.JPEG", ".DS_Store")
    train = with_files(
        archives / "train.tar",
        tmp_path / "train.tar",
        *(("./._n01440764.tar", b"Mac OS X"), ("n03000000.tar", new)),
    )
    val = with_files(
        archives / "val.tar", tmp_path / "val.tar", ("val/._ILSVRC2012_val_00000001.JPEG", b"Mac")
    )
    said = []
    labels = archives / "labels.txt"
    counts = prepare_imagenet(
        tmp_path / "out",
        train,
        val,
        val_labels=labels,
        report=lambda progress: said.append(progress.what),
        **PARTIAL,
    )
    assert counts == {"train": 20, "val": 8}
    passed_over = [text for text in said if "passed over" in text]
    assert passed_over == [
        f"{train}: 4 hidden files (such as ._*) are passed over",
        f"{val}: 1 hidden files (such as ._*) are passed over",
    ]


TWICE = {
    "class": (
        "train.tar",
        ("again/n01440764.tar", inner("n01440764_1.JPEG")),
        ".tar twice; valid: once",
    ),
    "training image": (
        "train.tar",
        ("n03000000.tar", inner("n03000000_1.JPEG", "a/n03000000_1.JPEG")),
        "train holds 'n03000000/n03000000_1.JPEG' twice",
    ),
    "validation image": (
        "val.tar",
        ("ILSVRC2012_val_00000001.JPEG", image(3)),
        "val holds 'n02119789/ILSVRC2012_val_00000001.JPEG' twice; valid: each image once",
    ),
}


@pytest.mark.parametrize(("which", "added", "message"), TWICE.values(), ids=TWICE)
def test_what_is_twice_in_an_archive_is_named(archives, tmp_path, which, added, message):
    files = {name: archives / name for name in ("train.tar", "val.tar")}
    files[which] = with_files(files[which], tmp_path / which, added)
    labels = archives / "labels.txt"
    with pytest.raises(DataError, match=message):
        prepare_imagenet(tmp_path / "out", *files.values(), val_labels=labels, **PARTIAL)
    assert not (tmp_path / "out").exists()


@settings(max_examples=10)
@given(st.lists(st.binary(min_size=1, max_size=200), max_size=2))
def test_no_name_in_an_archive_ends_in_a_traceback(archives, parts):
    """Names of any bytes, which need not be UTF-8."""
    folders = [part.translate(None, b"/\0").decode(errors="surrogateescape") for part in parts]
    name = "/".join(["n01440764", *filter(None, folders), "caf\udce9\x1b[31m.JPEG"])
    with tempfile.TemporaryDirectory() as folder:
        added = ("n03000000.tar", inner(name, "n03000000_1.JPEG"))
        train = with_files(archives / "train.tar", Path(folder) / "train.tar", added)
        out, output = Path(folder) / "out", Output("webdataset", images_per_shard=9)
        labels = archives / "labels.txt"
        with suppress(DataError):  # for names that lead out of the archive
            prepare_imagenet(out, train, archives / "val.tar", output, val_labels=labels, **PARTIAL)
            index = Index.load((out / "train" / INDEX_FILE).read_bytes(), "index")
            assert "n03000000/caf%E9%1B[31m.jpeg" in index.names or "/." in name


@pytest.mark.parametrize("within", [False, True], ids=["archive", "archive of a class"])
@pytest.mark.parametrize("name", ["../n01440764_9.JPEG", "/n01440764_9.JPEG", "a/.."])
def test_a_name_that_leads_out_of_an_archive_is_refused(archives, tmp_path, name, within):
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w") as archive:
        add(archive, name if within else "n01440764_9.JPEG", image(1))
    train = tmp_path / "train.tar"
    with tarfile.open(train, "w") as outer:
        add(outer, "n01440764.tar", inner.getvalue())
        if not within:
            add(outer, name, image(2))
    labels = archives / "labels.txt"
    with pytest.raises(DataError, match=r"train.tar holds the name .*, which is not inside"):
        prepare_imagenet(
            tmp_path / "out", train, archives / "val.tar", val_labels=labels, **PARTIAL
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("which", ["train.tar", "val.tar"])
def test_an_archive_truncated_anywhere_is_refused(archives, tmp_path, which):
    content = (archives / which).read_bytes()
    end = len(content.rstrip(b"\0"))
    generator = np.random.default_rng(0)
    files = {"train.tar": archives / "train.tar", "val.tar": archives / "val.tar"}
    cuts = [0, 512, 1024, end // 512 * 512, *generator.integers(1, end, 12).tolist()]
    for size in cuts:
        files[which] = tmp_path / "cut.tar"
        files[which].write_bytes(content[:size])
        with pytest.raises(DataError, match=r"cut.tar .*: get it again|cut.tar holds no"):
            prepare_imagenet(
                tmp_path / "out",
                files["train.tar"],
                files["val.tar"],
                val_labels=archives / "labels.txt",
                **PARTIAL,
            )
