"""ImageNet, from small archives in the format of the official ones."""

import io
import tarfile

import numpy as np
import pytest
from scipy.io import savemat

from largebatch.pipeline import ImageFolder, prepare_imagenet
from largebatch.pipeline.prepare import imagenet
from tests.conftest import refused
from tests.pipeline.formats import write_tar

# In the order of the development kit, which is not sorted.
SYNSETS = ["n02119789", "n01440764", "n02100735"]
ABOVE = "n00001740"
PER_CLASS = {"n01440764": 4, "n02100735": 9, "n02119789": 6}
VAL = [0, 1, 1, 2, 0, 2, 2, 1]  # classes of the validation images, by place in SYNSETS


def image(name):
    """Return bytes with the signature of a JPEG file; these tests decode nothing."""
    generator = np.random.default_rng(list(name.encode(errors="surrogateescape")[-9:]))
    return b"\xff\xd8\xff" + generator.bytes(int(generator.integers(100, 2000)))


def files(*names):
    return [(name, image(name)) for name in names]


def inner(*names):
    return write_tar(io.BytesIO(), files(*names)).getvalue()


def with_files(path, copy, *added):
    """Copy an archive, and append files to it."""
    with tarfile.open(path) as whole:
        old = [(info.name, whole.extractfile(info).read()) for info in whole]
    return write_tar(copy, [*old, *added])


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("imagenet")
    names = {s: [f"{s}_{i * 17}.JPEG" for i in range(PER_CLASS[s])] for s in SYNSETS}
    write_tar(folder / "train.tar", [(f"{s}.tar", inner(*of)) for s, of in names.items()])
    numbers = (3, 1, 2, 4, 5, 6, 8, 7)  # not in order
    write_tar(folder / "val.tar", files(*(f"ILSVRC2012_val_{n:08d}.JPEG" for n in numbers)))
    (folder / "labels.txt").write_text("".join(f"{SYNSETS[i]}\n" for i in VAL))
    boxes = [(f"{SYNSETS[k]} 1 2 30 40 " * (1 + i % 2), i) for i, k in enumerate(VAL, 1)]
    lines = [f"ILSVRC2012_val_{i:08d},{text}" for text, i in reversed(boxes)]
    (folder / "kaggle.csv").write_text("\n".join(["ImageId,PredictionString", *lines, ""]))
    rows = [(i, s, "tench", "a fish", 0, 0, 0, 1300) for i, s in enumerate(SYNSETS, 1)]
    rows += [(4, ABOVE, "entity", "that which is", 3, [1, 2, 3], 4, 0)]
    columns = "ILSVRC2012_ID WNID words gloss num_children children wordnet_height num_train_images"
    table = np.array(rows, dtype=[(name, object) for name in columns.split()])
    meta = io.BytesIO()
    savemat(meta, {"synsets": table.reshape(-1, 1)})
    devkit = {
        "meta.mat": meta.getvalue(),
        "ILSVRC2012_validation_ground_truth.txt": "".join(f"{i + 1}\n" for i in VAL).encode(),
    }
    named = [(f"ILSVRC2012_devkit_t12/data/{name}", file) for name, file in devkit.items()]
    write_tar(folder / "devkit.tar.gz", named, mode="w:gz")
    return folder


PARTIAL = {"allow_partial": True, "checksum": False}


def prepare(archives, out, output=None, train="train.tar", val="val.tar", **options):
    labels = {} if "devkit" in options else {"val_labels": archives / "labels.txt"}
    paths = archives / train, archives / val
    return prepare_imagenet(out, *paths, output, **{**labels, **PARTIAL, **options})


@pytest.mark.parametrize(
    ("labels", "name"),
    [("devkit", "devkit.tar.gz"), ("val_labels", "labels.txt"), ("val_labels", "kaggle.csv")],
)
def test_every_image_is_in_the_folder_of_its_class(archives, tmp_path, labels, name):
    counts = prepare(archives, tmp_path / "out", **{labels: archives / name})
    assert counts == {"train": 19, "val": 8}
    train = ImageFolder(tmp_path / "out", "train")
    val = ImageFolder(tmp_path / "out", "val", train.classes)
    assert train.classes == tuple(sorted(SYNSETS))
    assert np.bincount(train.labels).tolist() == [4, 9, 6]
    names = {val.name(i).rpartition("/")[2]: train.classes[k] for i, k in enumerate(val.labels)}
    assert names == {f"ILSVRC2012_val_{i:08d}.JPEG": SYNSETS[k] for i, k in enumerate(VAL, 1)}
    for source in (train, val):
        for i, content in enumerate(source.read(np.arange(len(source)))):
            assert content.tobytes() == image(source.name(i))


def test_validation_images_without_training_class_are_left_out(archives, tmp_path):
    names = {s: [f"{s}_{i}.JPEG" for i in range(5)] for s in SYNSETS[:2]}
    train = write_tar(tmp_path / "a.tar", [(f"{s}.tar", inner(*of)) for s, of in names.items()])
    assert prepare(archives, tmp_path / "out", train=train) == {"train": 10, "val": 5}


def test_counts_and_checksums_must_be_the_official_ones(archives, tmp_path, monkeypatch):
    def wrong(message, **options):
        whole = {"allow_partial": False}
        refused(message, prepare, archives, tmp_path / "out", **whole | options)

    wrong(r"val.tar has the MD5 checksum .*, not 29b22e2961454d541", checksum=True)
    wrong(r"train.tar has 3 classes, not 1,000 \(--allow-partial")
    monkeypatch.setattr(imagenet, "CLASSES", 3)
    wrong(r"train.tar has 19 images, not 1,281,167 \(--allow-part")
    monkeypatch.setattr(imagenet, "COUNTS", {"train": 19, "val": 50_000})
    wrong(r"val.tar has 8 images, not 50,000 \(--allow-partial")
    assert not (tmp_path / "out").exists()


def test_missing_and_wrong_archives_are_named(archives, tmp_path):
    train, val, labels = archives / "train.tar", archives / "val.tar", archives / "labels.txt"
    short, odd = tmp_path / "short.txt", tmp_path / "odd.txt"
    empty = write_tar(tmp_path / "empty.tar", [])
    short.write_text("n01440764\n" * 3)
    odd.write_text("n01440764\ntench\n")

    def wrong(message, train, val, labels=None, **options):
        options = PARTIAL | {"val_labels": labels} | options
        refused(message, prepare_imagenet, tmp_path / "out", train, val, **options)

    login = r"from https://image-net.org/download-images.php \(log in there first\)"
    wrong(rf"--train-archive is missing: download ILSVRC2012_img_train.tar.* {login}", None, val)
    wrong(r"--val-archive: there is no file nope: download ILSVRC", train, "nope")
    wrong(r"--devkit is missing: download .*, or give --val-labels", train, val)
    wrong(r"--train-archive: .*val.tar holds no archive of a class", val, val, labels)
    wrong("--val-archive: .*train.tar holds 'n02119789.tar', not ILSVRC", train, train, labels)
    wrong("--val-archive: .*empty.tar has no images of the train", train, empty, labels)
    wrong(r"val_0000000\d.JPEG of .* has no class: there are 3 labels", train, val, short)
    wrong(r"--val-labels: line 2 of .*odd.txt is 'tench'; valid: a synset", train, val, odd)
    wrong(r"labels.txt is not a tar", labels, val, labels)
    wrong(r"--devkit: .*train.tar is not the development kit", train, val, devkit=train)
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
        wrong(message, train, val, odd)
    assert not (tmp_path / "out").exists()


def test_hidden_files_are_passed_over_and_counted(archives, tmp_path):
    """As the tar of macOS adds them."""
    new = inner("./._n03000000_1.JPEG", "./n03000000_1.JPEG", "__MACOSX/x.JPEG", ".DS_Store")
    hidden = ("./._n01440764.tar", b"Mac OS X")
    train = with_files(archives / "train.tar", tmp_path / "t.tar", hidden, ("n03000000.tar", new))
    hidden = ("val/._ILSVRC2012_val_00000001.JPEG", b"Mac")
    val = with_files(archives / "val.tar", tmp_path / "val.tar", hidden)
    said = []
    options = {"train": train, "val": val, "report": lambda progress: said.append(progress.what)}
    assert prepare(archives, tmp_path / "out", **options) == {"train": 20, "val": 8}
    assert [text for text in said if "passed over" in text] == [
        f"{train}: 4 hidden files (such as ._*) are passed over",
        f"{val}: 1 hidden files (such as ._*) are passed over",
    ]


def test_what_is_twice_in_an_archive_or_leads_out_of_it_is_named(archives, tmp_path):
    new = inner("n03000000_1.JPEG", "a/n03000000_1.JPEG")
    leads_out = "train.tar holds the name .*, which leads out of it"
    for which, added, message in (
        ("train", ("again/n01440764.tar", new), ".tar twice; valid: once"),
        ("train", ("n03000000.tar", new), "train holds 'n03000000/n03000000_1.JPEG' twice"),
        ("val", *files("ILSVRC2012_val_00000001.JPEG"), "val holds 'n02119789/.*_00000001.JPEG' t"),
        ("train", ("n03000000.tar", inner("../n03000000_9.JPEG")), leads_out),
        ("train", ("n03000000.tar", inner("a/..")), leads_out),
        ("train", *files("/n01440764_9.JPEG"), leads_out),
    ):
        (tmp_path / which).mkdir(exist_ok=True)
        path = with_files(archives / f"{which}.tar", tmp_path / which / f"{which}.tar", added)
        refused(message, prepare, archives, tmp_path / "out", **{which: path})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("which", ["train", "val"])
def test_an_archive_truncated_anywhere_is_refused(archives, tmp_path, which):
    content = (archives / f"{which}.tar").read_bytes()
    end, cut = len(content.rstrip(b"\0")), tmp_path / "cut.tar"
    random = np.random.default_rng(0).integers(1, end, 6).tolist()
    for size in [0, 512, 1024, end // 512 * 512, *random]:
        cut.write_bytes(content[:size])
        message = r"cut.tar (is|has|holds no)"
        refused(message, prepare, archives, tmp_path / "out", **{which: cut})
