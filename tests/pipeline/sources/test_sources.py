"""Image folders and their faults."""

import os

from largebatch.pipeline import ImageFolder
from tests.conftest import refused


def test_classes_and_images_are_numbered_by_name(photos):
    train = ImageFolder(photos, "train")
    assert train.classes == ("ant", "bee", "cat")
    assert len(train) == 53
    assert train.labels.tolist() == [0] * 20 + [1] * 16 + [2] * 17
    assert train.name(20) == str(photos / "train" / "bee" / "000.JPEG")


def test_validation_has_the_class_numbers_of_training(photos, tmp_path):
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "cat").symlink_to(photos / "val" / "cat")
    assert set(ImageFolder(tmp_path, "val", ("ant", "bee", "cat")).labels) == {2}
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


def test_the_fingerprint_depends_on_names_and_labels_not_on_the_path(photos, tmp_path):
    (tmp_path / "train").symlink_to(photos / "train")
    assert ImageFolder(tmp_path).fingerprint == ImageFolder(photos).fingerprint
    assert ImageFolder(photos, "val").fingerprint != ImageFolder(photos).fingerprint
