"""Shards read back by other packages: tarfile, DALI with our idx files, TensorBoard, protobuf."""

import hashlib
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import nvidia.dali.tfrecord as tfrec
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from nvidia.dali import fn, pipeline_def
from tensorboard.compat.tensorflow_stub.errors import OutOfRangeError
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
from wds2idx import IndexCreator

from largebatch.pipeline import DataError, Output, prepare_folder
from largebatch.pipeline.prepare.writers import SHARD_FORMATS
from largebatch.pipeline.sources import INDEX_FILE, Index


@pytest.fixture(scope="module")
def shards(photos, tmp_path_factory):
    """The photos in shards of each format."""
    out = tmp_path_factory.mktemp("shards")
    for form in SHARD_FORMATS:
        counts = prepare_folder(out / form, photos, Output(form, images_per_shard=20))
        assert counts == {"train": 53, "val": 23}
    return out


def originals(photos, split):
    """Return bytes and label of each image by its name without extension."""
    files = sorted((photos / split).rglob("*.JPEG"))
    classes = sorted(path.name for path in (photos / split).iterdir())
    return {
        f"{path.parent.name}/{path.stem}": (path.read_bytes(), classes.index(path.parent.name))
        for path in files
    }


def load(folder):
    return Index.load((folder / INDEX_FILE).read_bytes(), "index")


@pytest.mark.parametrize("form", SHARD_FORMATS)
@pytest.mark.parametrize("split", ["train", "val"])
def test_the_index_gives_the_position_of_every_image(shards, photos, form, split):
    folder, wanted = shards / form / split, originals(photos, split)
    index = load(folder)
    assert index.format == form
    assert index.classes == ("ant", "bee", "cat")
    assert sorted(np.bincount(index.shard)) == ([17, 18, 18] if split == "train" else [11, 12])
    content = [(folder / name).read_bytes() for name in index.shards]
    assert [len(c) for c in content] == index.shard_bytes.tolist()
    assert tuple(hashlib.sha256(c).hexdigest() for c in content) == index.shard_sha256
    found = {
        name.rpartition(".")[0]: (content[shard][offset : offset + length], label)
        for name, shard, offset, length, label in zip(
            index.names, index.shard, index.offset, index.length, index.labels, strict=True
        )
    }
    assert found == wanted
    assert not index.split.any()
    if split == "val":
        assert list(found) == list(wanted)  # in order
    else:
        assert list(found) != list(wanted)
        assert len(set(index.labels[:18].tolist())) == 3


@pipeline_def(batch_size=10, num_threads=1, device_id=None)
def dali(form, paths, idx):
    if form == "webdataset":
        return tuple(fn.readers.webdataset(paths=paths, index_paths=idx, ext=["jpeg", "cls"]))
    features = {
        "image/encoded": tfrec.FixedLenFeature((), tfrec.string, ""),
        "image/class/label": tfrec.FixedLenFeature([1], tfrec.int64, -1),
    }
    found = fn.readers.tfrecord(path=paths, index_path=idx, features=features)
    return found["image/encoded"], found["image/class/label"]


def read_by_dali(form, paths, count):
    """Return the bytes and labels of the images of one epoch."""
    pipe = dali(form, [str(p) for p in paths], [str(p.with_suffix(".idx")) for p in paths])
    found = []
    while len(found) < count:
        images, labels = pipe.run()
        for i in range(len(images)):
            label = np.array(labels[i])
            number = int(label.tobytes()) if form == "webdataset" else int(label.ravel()[0])
            found.append((np.array(images[i]).tobytes(), number))
    return found[:count]


@pytest.mark.parametrize("form", SHARD_FORMATS)
@pytest.mark.parametrize("split", ["train", "val"])
def test_dali_reads_the_same_images_and_labels_with_our_idx_files(shards, photos, form, split):
    folder, wanted = shards / form / split, originals(photos, split)
    index = load(folder)
    found = read_by_dali(form, [folder / name for name in index.shards], len(index))
    assert found == [wanted[name.rpartition(".")[0]] for name in index.names]


def test_tarfile_and_wds2idx_agree_on_webdataset_shards(shards, photos, tmp_path):
    wanted = originals(photos, "train")
    for path in sorted((shards / "webdataset" / "train").glob("*.tar")):
        with tarfile.open(path) as archive:
            infos = archive.getmembers()
            assert {info.mtime for info in infos} == {0}
            for image, label in zip(infos[::2], infos[1::2], strict=True):
                key = image.name.removesuffix(".jpeg")
                assert label.name == f"{key}.cls"
                content, number = wanted[key]
                assert archive.extractfile(image).read() == content
                assert archive.extractfile(label).read() == str(number).encode()
        assert path.stat().st_size % tarfile.RECORDSIZE == 0
        with IndexCreator(str(path), str(tmp_path / "theirs.idx"), verbose=False) as creator:
            creator.create_index()
        assert (tmp_path / "theirs.idx").read_text() == path.with_suffix(".idx").read_text()


def example_class():
    """``tf.train.Example`` as example.proto and feature.proto declare it."""
    file = descriptor_pb2.FileDescriptorProto(name="e.proto", package="t", syntax="proto3")

    def message(name, *fields, oneof=False, within=None):
        made = (within.nested_type if within else file.message_type).add(name=name)
        if oneof:
            made.oneof_decl.add(name="kind")
        for number, (field, kind, repeated, of) in enumerate(fields, 1):
            entry = made.field.add(name=field, number=number, type=kind, label=1 + 2 * repeated)
            if of:
                entry.type_name = f".t.{of}"
            if oneof:
                entry.oneof_index = 0
        return made

    message("BytesList", ("value", 12, True, None))
    message("FloatList", ("value", 2, True, None))
    message("Int64List", ("value", 3, True, None))
    lists = [
        ("bytes_list", 11, False, "BytesList"),
        ("float_list", 11, False, "FloatList"),
        ("int64_list", 11, False, "Int64List"),
    ]
    message("Feature", *lists, oneof=True)
    features = message("Features", ("feature", 11, True, "Features.FeatureEntry"))
    entry = message(
        "FeatureEntry", ("key", 9, False, None), ("value", 11, False, "Feature"), within=features
    )
    entry.options.map_entry = True
    message("Example", ("features", 11, False, "Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


def test_tensorboard_and_protobuf_read_tfrecord_shards(shards, photos):
    folder, wanted, example = shards / "tfrecord" / "val", originals(photos, "val"), example_class()
    index = load(folder)
    messages = []
    for name in index.shards:
        reader = PyRecordReader_New(str(folder / name))
        while True:
            try:
                reader.GetNext()  # verifies both checksums
            except OutOfRangeError:
                break
            messages.append(reader.record())
    assert len(messages) == len(index)
    for name, message in zip(index.names, messages, strict=True):
        found = example.FromString(message).features.feature
        content, label = wanted[name.removesuffix(".JPEG")]
        assert sorted(found) == [
            "image/class/label",
            "image/class/synset",
            "image/encoded",
            "image/filename",
        ]
        assert list(found["image/encoded"].bytes_list.value) == [content]
        assert list(found["image/class/label"].int64_list.value) == [label]
        synset, _, file = name.partition("/")
        assert list(found["image/class/synset"].bytes_list.value) == [synset.encode()]
        assert list(found["image/filename"].bytes_list.value) == [file.encode()]


def test_tfrecord2idx_makes_the_same_index(shards, tmp_path):
    script = Path(sys.executable).with_name("tfrecord2idx")
    for path in sorted((shards / "tfrecord" / "val").glob("*.tfrecord")):
        theirs = tmp_path / "theirs.idx"
        subprocess.run([sys.executable, script, path, theirs], check=True)
        assert theirs.read_text() == path.with_suffix(".idx").read_text()


def test_checksums_of_tfrecord_are_crc32c():
    """RFC 3720, B.4, and the mask of TensorFlow's crc32c.h."""
    crc = 0x8A9136AA  # of 32 zero bytes
    masked = ((crc >> 15) | (crc << 17) & 0xFFFFFFFF) + 0xA282EAD8 & 0xFFFFFFFF
    assert SHARD_FORMATS["tfrecord"]()._masked(bytes(32)) == masked.to_bytes(4, "little")


@pytest.mark.parametrize(
    ("form", "names", "message"),
    [
        ("webdataset", ["a.jpeg", "a.png"], "train/c/a.jpeg and train/c/a.png would both be c/a "),
        ("webdataset", ["a b.jpeg", "a.b.jpeg"], "would both be c/a_b in format=webdataset: ren"),
        ("tfrecord", ["a\nb.jpeg"], "contains a line break: rename it"),
        ("tfrecord", ["a\udcff.jpeg"], "is not UTF-8: rename it"),
    ],
)
def test_names_that_a_format_cannot_hold_are_named(tmp_path, form, names, message):
    folder = tmp_path / "in" / "train" / "c"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(b"\xff\xd8\xff")
    with pytest.raises(DataError, match=re.escape(message)):
        prepare_folder(tmp_path / "out", tmp_path / "in", Output(form))
    assert not (tmp_path / "out").exists()


def test_long_and_unusual_names_are_read_by_other_packages(tmp_path):
    names = [f"{'é' * 90}{i}.JPG" for i in range(3)] + ["it's 100 % odd, v1.2.png"]
    folder = tmp_path / "in" / "train" / "golden retriever"
    folder.mkdir(parents=True)
    for i, name in enumerate(names):
        (folder / name).write_bytes(b"\xff\xd8\xff%d" % i)
    prepare_folder(tmp_path / "out", tmp_path / "in", Output("webdataset"))
    path = tmp_path / "out" / "train" / "train-00000.tar"
    index = load(path.parent)
    with tarfile.open(path) as archive:
        assert tuple(archive.getnames()[::2]) == index.names
        assert "golden_retriever/it's_100_%_odd,_v1_2.png" in index.names
    with IndexCreator(str(path), str(tmp_path / "theirs.idx"), verbose=False) as creator:
        assert [m[0] for m in creator._get_data_tarfile()][::2] == index.offset.tolist()
    pipe = dali("webdataset", [str(path)], [str(path.with_suffix(".idx"))])
    assert index.classes == ("golden retriever",)
    pipe.build()
