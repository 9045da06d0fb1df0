"""Image folders and their faults."""

import os

import pytest

from largebatch.pipeline import DataError, ImageFolder


def test_classes_and_images_are_numbered_by_name(photos):
    train = ImageFolder(photos, "train")
    assert train.classes == ("ant", "bee", "cat")
    assert len(train) == 53
    assert train.labels.tolist() == [0] * 20 + [1] * 16 + [2] * 17
    assert train.name(20) == str(photos / "train" / "bee" / "000.JPEG")


def test_other_files_are_ignored(photos, tmp_path):
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    for name in ("x.jpg", "y.PNG", "z.txt", ".hidden.jpg", "list.csv"):
        (folder / name).touch()
    (tmp_path / "train" / "labels.txt").touch()
    source = ImageFolder(tmp_path, "train")
    assert [source.name(i).rpartition("/")[2] for i in range(len(source))] == ["x.jpg", "y.PNG"]


def test_validation_has_the_class_numbers_of_training(photos, tmp_path):
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "cat").symlink_to(photos / "val" / "cat")
    source = ImageFolder(tmp_path, "val", ("ant", "bee", "cat"))
    assert set(source.labels) == {2}
    with pytest.raises(
        DataError, match=r"val/cat is not a class of the training images \(2 classes"
    ):
        ImageFolder(tmp_path, "val", ("ant", "bee"))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no data folder .*/nowhere/train; valid: one folder"):
        ImageFolder(tmp_path / "nowhere")
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="train has no class folders"):
        ImageFolder(tmp_path)


def test_an_empty_class_folder_is_named(photos, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "ant").symlink_to(photos / "train" / "ant")
    (tmp_path / "train" / "bee").mkdir()
    with pytest.raises(DataError, match=r"/train/bee has no images"):
        ImageFolder(tmp_path)


def test_a_folder_that_cannot_be_read_is_named(photos, tmp_path, monkeypatch):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "ant").symlink_to(tmp_path / "train" / "ant")
    with pytest.raises(DataError, match=r"train/ant cannot be read: Too many levels of symbolic"):
        ImageFolder(tmp_path)

    scandir = os.scandir

    def refuse(folder):
        if folder.name == "bee":
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(DataError, match=r"train/bee cannot be read: Permission denied"):
        ImageFolder(photos)


def test_the_fingerprint_depends_on_names_and_labels_not_on_the_path(photos, tmp_path):
    (tmp_path / "train").symlink_to(photos / "train")
    assert ImageFolder(tmp_path).fingerprint == ImageFolder(photos).fingerprint
    assert ImageFolder(photos, "val").fingerprint != ImageFolder(photos).fingerprint
