"""The loader gives the same batches of shards as of folders, locally and from a server."""

import shutil

import pytest
import torch

from largebatch.pipeline import (
    DataError,
    ImageFolder,
    Loader,
    Shards,
    Transform,
)
from tests.pipeline.formats import write_data_set
from tests.pipeline.web_server import WebServer

pytestmark = pytest.mark.slow("trains on shards")

SMALL = Transform(image_size=24, eval_resize=28)
FORMATS = ["webdataset", "tfrecord", "recordio"]


@pytest.fixture(scope="module", params=FORMATS)
def shards(request, photos, tmp_path_factory):
    """The photos in shards of 20 images, and their format."""
    root = tmp_path_factory.mktemp("shards") / request.param
    write_data_set(request.param, root, photos, images_per_shard=20)
    return root, request.param


def source(shards, split="train", root=None):
    classes = ("ant", "bee", "cat") if split == "val" else None
    return Shards(root or shards[0], split, format=shards[1], classes=classes)


def batches(images, **options):
    options = {"batch_size": 12, "epochs": 2, "threads": 1} | options
    return list(Loader(images, SMALL, **options))


def test_evaluation_has_the_batches_of_folders(photos, shards):
    folder = batches(ImageFolder(photos, "val"), training=False)
    ours = batches(source(shards, "val"), training=False)
    for a, b in zip(ours, folder, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)


@pytest.mark.parametrize("backend", ["nvimgcodec", "dali-cpu", "torchvision"])
def test_training_resumes_and_reshards_over_ranks(photos, shards, backend):
    options = {"backend": backend}
    whole = batches(source(shards), **options)
    epoch = torch.cat([b.labels for b in batches(source(shards), batch_size=53, epochs=1)])
    assert epoch.bincount().tolist() == [20, 16, 17]
    first = Loader(source(shards), SMALL, batch_size=12, epochs=2, **options)
    for _ in zip(range(5), first, strict=False):
        pass
    ranks = [
        Loader(source(shards), SMALL, batch_size=12, epochs=2, rank=r, world_size=2, **options)
        for r in range(2)
    ]
    for rank in ranks:
        rank.load_state_dict(first.state_dict(), reshard=True)
    blocks = [b.images for round_ in zip(*ranks, strict=True) for b in round_]
    assert torch.equal(torch.cat(blocks), torch.cat([b.images for b in whole[5:]]))


def test_a_checkpoint_of_folders_is_refused_for_shards(photos, shards):
    state = Loader(ImageFolder(photos), SMALL, batch_size=12).state_dict()
    with pytest.raises(DataError, match=f"saved with source folder, now it is {shards[1]}: the or"):
        Loader(source(shards), SMALL, batch_size=12).load_state_dict(state)


def test_a_bad_image_in_a_shard_is_named_or_skipped(shards, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(shards[0], root)
    images = source(shards, root=root)
    index = images.index
    shard = root / "train" / index.shards[index.shard[3]]
    with open(shard, "r+b") as file:
        file.seek(index.offset[3])
        file.write(b"\0" * 100)
    with pytest.raises(
        DataError, match=rf"train-0000\d\.\w+:.*{index.names[3]} cannot be (deco|rea)d"
    ):
        batches(images)
    training = Loader(images, SMALL, batch_size=53, epochs=2, on_error="skip")
    assert [len(batch.labels) for batch in training] == [53, 53]
    assert list(training.skipped) == [images.name(3)]
    assert training.replaced == 2


def test_a_server_gives_the_same_batches(shards):
    local = batches(source(shards))
    with WebServer(shards[0]) as server:
        remote = batches(source(shards, root=server.url))
    for a, b in zip(local, remote, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)
