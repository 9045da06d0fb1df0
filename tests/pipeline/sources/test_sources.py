"""Local sources: image folders and their faults, parts of a source, and byte ranges of files."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.pipeline import ImageFolder, hold_out
from largebatch.pipeline.sources.storage.local import ByteRange, LocalStorage, OpenFiles
from tests.conftest import refused


def test_classes_and_images_are_numbered_by_name_and_in_both_splits_alike(photos, tmp_path):
    train, val = ImageFolder(photos), ImageFolder(photos, "val")
    assert train.classes == ("ant", "bee", "cat")
    assert train.labels.tolist() == [0] * 20 + [1] * 16 + [2] * 17
    assert train.name(20) == str(photos / "train" / "bee" / "000.JPEG")
    (tmp_path / "train").symlink_to(photos / "train")
    assert ImageFolder(tmp_path).fingerprint == train.fingerprint != val.fingerprint
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "cat").symlink_to(photos / "val" / "cat")
    assert set(ImageFolder(tmp_path, "val", train.classes).labels) == {2}
    message = r"val/cat is not a class of the training images \(2 classes"
    refused(message, ImageFolder, tmp_path, "val", ("ant", "bee"))


def test_folders_that_cannot_be_read_are_named(photos, tmp_path, monkeypatch):
    message = r"no data folder .*/nowhere/train; valid: one folder"
    refused(message, ImageFolder, tmp_path / "nowhere")
    (tmp_path / "train").mkdir()
    refused("train has no class folders", ImageFolder, tmp_path)
    scandir = os.scandir

    def refuse(folder):
        if folder.name == "bee":
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr("os.scandir", refuse)
    refused("train/bee cannot be read: Permission denied", ImageFolder, photos)


@pytest.fixture(scope="module")
def folder(photos):
    return ImageFolder(photos)


@given(count=st.integers(1, 52))
def test_every_image_is_in_exactly_one_part(folder, count):
    kept, held = hold_out(folder, count)
    assert len(held) == count
    parts = [(part.name(i), part.labels[i]) for part in (kept, held) for i in range(len(part))]
    assert sorted(parts) == [(folder.name(i), folder.labels[i]) for i in range(len(folder))]
    assert kept.classes == held.classes == folder.classes
    for part in (kept, held):
        assert part.read(np.array([0]))[0].tobytes() == Path(part.name(0)).read_bytes()
    again = [part.fingerprint for part in hold_out(folder, count)]
    assert again == [kept.fingerprint, held.fingerprint]
    assert len({*again, folder.fingerprint, hold_out(folder, count % 52 + 1)[0].fingerprint}) == 4
    assert not 14 < count < 38 or {*held.labels} == {*kept.labels} == {0, 1, 2}
    for wrong in (0, 53):
        refused(f"hold out {wrong} of 53 images; valid: 1 to 52", hold_out, folder, wrong)


# Byte ranges of files, read by many threads


def open_files(folder):
    """Paths of the files of a folder that this process has open."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    paths = [os.readlink(link) for link in links if os.path.lexists(link)]
    return [path for path in paths if path.startswith(str(folder))]


def test_truncated_and_missing_files_are_reported(tmp_path):
    (tmp_path / "two.tar").write_bytes(bytes(range(20)))
    storage = LocalStorage(tmp_path)
    ranges = [("two.tar", 10, 20), ("gone", 0, 1), ("two.tar", 0, 2)]
    short, missing, right = storage.read([ByteRange(*wanted) for wanted in ranges])
    assert short.endswith(" is 10 bytes too short")
    assert missing == "cannot be read: No such file or directory (ENOENT)"
    assert right.tobytes() == b"\0\1"
    assert open_files(tmp_path) == []


def test_threads_do_not_close_files_of_other_threads(tmp_path, monkeypatch):
    """A file closed by another thread could be read as whatever was opened after it."""
    monkeypatch.setattr(OpenFiles, "_MOST", 2)
    for number in range(20):
        (tmp_path / f"{number}.tar").write_bytes(bytes([number]) * 1000)
    storage = LocalStorage(tmp_path)

    def read(seed, storage=storage):
        numbers = np.random.default_rng(seed).integers(0, 20, 300).tolist()
        found = [storage.read([ByteRange(f"{n}.tar", 10, 900)])[0] for n in numbers]
        return all(
            not isinstance(f, str) and f.tobytes() == bytes([n]) * 900
            for n, f in zip(numbers, found, strict=True)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(16)))
    assert len(open_files(tmp_path)) == 2
    del storage, read
    assert open_files(tmp_path) == []
