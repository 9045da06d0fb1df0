"""The digits, and CIFAR-10 from archives in the official format and with image files."""

import io
import pickle
import tarfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from largebatch.pipeline import ImageFolder, prepare_cifar10
from tests.conftest import refused
from tests.pipeline.formats import images_of, write_tar

CLASSES = [b"airplane", b"automobile", b"bird"]
PER_BATCH = 7


class Python2Pickler(pickle._Pickler):
    """Pickles byte strings and module names as Python 2 did for the official archive."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, content):
        content = content.encode() if isinstance(content, str) else content
        self.write(pickle.BINSTRING + len(content).to_bytes(4, "little") + content)
        self.memoize(content)

    def save_global(self, thing, name=None):
        module = thing.__module__.replace("numpy._core", "numpy.core")
        self.write(pickle.GLOBAL + f"{module}\n{thing.__qualname__}\n".encode())
        self.memoize(thing)

    dispatch[bytes] = dispatch[str] = save_string
    dispatch[type] = dispatch[type(len)] = dispatch[type(save_string)] = save_global


def python2(content):
    out = io.BytesIO()
    Python2Pickler(out, 2).dump(content)
    return out.getvalue()


def pixels_of(seed):
    return np.random.default_rng(seed).integers(0, 256, (PER_BATCH, 3072), dtype=np.uint8)


def labels_of(seed):
    return [(seed + i) % 3 for i in range(PER_BATCH)]


def official(path, **batches):
    """Write an archive, in which ``batches`` replace the usual content."""
    files = {}
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        batch = {b"data": pixels_of(seed), b"labels": labels_of(seed), b"batch_label": b"x"}
        files[name] = python2(batch)
    files["batches.meta"] = python2({b"label_names": CLASSES, b"num_vis": 3072})
    named = ((f"cifar-10-batches-py/{name}", file) for name, file in (files | batches).items())
    return write_tar(path, named, mode="w:gz")


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return official(tmp_path_factory.mktemp("cifar10") / "cifar-10-python.tar.gz")


PARTIAL = {"allow_partial": True, "checksum": False}


def test_every_pixel_of_the_official_archive_is_kept(archive, tmp_path):
    counts = prepare_cifar10(tmp_path / "out", archive, **PARTIAL)
    assert counts == {"train": 5 * PER_BATCH, "val": PER_BATCH}
    for split, seeds in (("train", range(5)), ("val", [5])):
        source = ImageFolder(tmp_path / "out", split)
        assert source.classes == ("airplane", "automobile", "bird")
        pixels = np.concatenate([pixels_of(seed) for seed in seeds])
        labels = [label for seed in seeds for label in labels_of(seed)]
        numbers = [int(Path(source.name(i)).stem) for i in range(len(source))]
        assert sorted(numbers) == [*range(len(labels))]
        for i, number in enumerate(numbers):
            assert source.labels[i] == labels[number]
            colours = pixels[number].reshape(3, 1024).T.reshape(32, 32, 3)
            np.testing.assert_array_equal(np.asarray(Image.open(source.name(i))), colours)


def test_an_archive_of_files_keeps_their_bytes(photos, tmp_path):
    path = tmp_path / "files.tar"
    with tarfile.open(path, "w:xz") as archive:
        archive.add(photos / "train", "./train")
        archive.add(photos / "val", "./test")
    out = tmp_path / "out"
    assert prepare_cifar10(out, path, allow_partial=True) == {"train": 53, "val": 23}
    for split in ("train", "val"):
        assert images_of(out / split) == images_of(photos / split)


def test_a_pickle_cannot_call_anything(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "touched"), "w"))

    for dumps in (pickle.dumps, lambda e: pickle.dumps({b"data": e, b"labels": []}, 2)):
        archive = official(tmp_path / "evil.tar.gz", data_batch_3=dumps(Evil()))
        message = r"data_batch_3 in .* is not CIFAR-10: it refers to"
        refused(message, prepare_cifar10, tmp_path / "out", archive, **PARTIAL)
    assert not (tmp_path / "touched").exists()
    assert not (tmp_path / "out").exists()


GOOD = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]}
BAD = {
    "no pickle": (b"no pickle", "data_batch_1 in .* is not CIFAR-10"),
    "no dictionary": (python2([1]), "it holds no dictionary"),
    **{
        str(number): (python2(GOOD | changed), "does not hold pixels and labels")
        for number, changed in enumerate(
            (
                {b"data": None},
                {b"data": np.zeros((2, 9), np.uint8)},
                {b"data": np.zeros((2, 3072), np.int16)},
                {b"labels": [0, 3]},
                {b"labels": [0]},
            )
        )
    },
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_a_damaged_batch_is_named(tmp_path, content, message):
    archive = official(tmp_path / "bad.tar.gz", data_batch_1=content)
    refused(message, prepare_cifar10, tmp_path / "out", archive, **PARTIAL)


@pytest.mark.parametrize("name", ["/train/ant/x.jpg", "train/ant/../../x.jpg"])
def test_names_that_lead_out_of_the_archive_or_the_data_set_are_refused(tmp_path, name):
    path, out = tmp_path / "a" / "in.tar", tmp_path / "a" / "b" / "out"
    path.parent.mkdir()
    files = [(f"{split}/ant/y.jpg", b"\xff\xd8\xff") for split in ("train", "test")]
    write_tar(path, files)
    assert prepare_cifar10(tmp_path / "inside", path, **PARTIAL) == {"train": 1, "val": 1}
    write_tar(path, [*files, (name, b"\xff\xd8\xff")])
    message = r"in.tar holds the name .*, which leads out of it"
    refused(message, prepare_cifar10, out, path, **PARTIAL)
    meta = python2({b"label_names": [b"../../../evil", *CLASSES[1:]]})
    archive = official(path, **{"batches.meta": meta})
    message = r"the data set holds the name '../../../evil', which leads out of it"
    refused(message, prepare_cifar10, out, archive, **PARTIAL)
    assert [*tmp_path.rglob("x.jpg"), *tmp_path.rglob("evil*")] == []


def test_missing_and_wrong_archives_are_named_with_where_to_get_them(archive, photos, tmp_path):
    def prepare(message, archive, **options):
        refused(message, prepare_cifar10, tmp_path / "out", archive, **options)

    prepare(r"--archive is missing: download cifar-10-python.tar.gz ", None)
    prepare(r"--archive: there is no file .*nope: download cifar-10", tmp_path / "nope")
    prepare(r"has the MD5 checksum .*, not c58f.* \(--no-checksum", archive)
    prepare(r"has 35 images for train, not 50,000 \(--allow-partial", archive, checksum=False)
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(archive.read_bytes()[:-5000])
    prepare(r"cut.tar.gz is broken or truncated .*: get it again", cut, **PARTIAL)
    other = write_tar(tmp_path / "other.tar", [("train/ant/x.jpg", b"")])
    prepare(r"other.tar has no files test/<class>/<image>.jpg; down", other, **PARTIAL)
    assert not (tmp_path / "out").exists()


def test_every_digit_is_written_once_with_its_pixels(digits):
    original = load_digits()
    train, val = ImageFolder(digits, "train"), ImageFolder(digits, "val")
    assert (len(train), len(val)) == (1437, 360)
    assert train.classes == val.classes == tuple("0123456789")
    seen = set()
    for source in (train, val):
        for i in range(len(source)):
            path = source.name(i)
            number = int(path.rpartition("/")[2].removesuffix(".jpeg"))
            seen.add(number)
            assert original.target[number] == source.labels[i]
            if number % 50 == 0:
                image = Image.open(path)
                assert (image.format, image.size, image.mode) == ("JPEG", (32, 32), "L")
                small = np.asarray(image.resize((8, 8), Image.Resampling.BOX)) * (16 / 255)
                assert np.abs(small - original.images[number]).mean() < 1
    assert seen == set(range(1797))
    assert all(int(val.name(i)[-9:-5]) % 5 == 0 for i in range(360))
