"""Faults of reading, injected into system calls: none of them is a property of an image."""

import errno
import os
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from benchmarks.pipeline.odd_images import encode
from largebatch.pipeline import DataError, ImageFolder, Loader, Shards, Transform
from largebatch.pipeline.decode import reader
from tests.conftest import refused
from tests.pipeline.formats import write_tar

SMALL = Transform(image_size=16, eval_resize=16)
IMAGES, BAD = 12, (3, 7)  # the numbers of images that cannot be decoded
ERRNOS = (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOENT)
#: What happens to a call: nothing, an error, the end of the file, or a few bytes only.
OPENS = st.lists(st.none() | st.sampled_from(ERRNOS), max_size=30)
READS = st.lists(st.none() | st.sampled_from([*ERRNOS, "end", "few"]), max_size=60)
CALLS = ("open", "preadv", "readv")
CALL = {name: getattr(os, name) for name in CALLS}


def content(number):
    return b"no image" if number in BAD else encode(Image.new("L", (24, 24), 9 * number), "JPEG")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for split in ("train", "val"):
        (root / split / "class").mkdir(parents=True)
        for number in range(IMAGES):
            (root / split / "class" / f"{number:02}.jpg").write_bytes(content(number))
        (root / f"shards-{split}").mkdir()
        for shard in range(4):
            members = []
            for number in range(3 * shard, 3 * shard + 3):
                members += [(f"{number:02}.jpg", content(number)), (f"{number:02}.cls", b"0")]
            write_tar(root / f"shards-{split}" / f"{shard}.tar", members)
    return root


def source(root, kind, split):
    if kind == "folder":
        return ImageFolder(root, split)
    return Shards(root, f"shards-{split}", format="webdataset")


def inject(monkeypatch, root, opens, reads):
    """Let the calls that open and read images meet faults in turn, and then none."""
    left, lock = {"open": list(opens), "read": list(reads)}, threading.Lock()

    def faulty(name):
        def call(*arguments, **options):
            mine = name != "open" or str(arguments[0]).startswith(str(root))
            with lock:
                own = left["open" if name == "open" else "read"]
                fault = own.pop(0) if mine and own else None
            if fault is None:
                return CALL[name](*arguments, **options)
            if fault == "end":
                return 0
            if fault == "few":
                part = arguments[1][0][:5]
                return CALL[name](arguments[0], [part], *arguments[2:])
            raise OSError(fault, os.strerror(fault))

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, faulty(name))
    return left


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(kind=st.sampled_from(["folder", "shards"]), training=st.booleans(), opens=OPENS, reads=READS)
def test_only_images_that_cannot_be_decoded_are_remembered(root, kind, training, opens, reads):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(reader, "_WAITS", (0, 0))
        split = "train" if training else "val"
        options = {"batch_size": IMAGES, "training": training, "epochs": 6 if training else None}
        images = source(root, kind, split)
        loader = Loader(images, SMALL, backend="torchvision", on_error="skip", threads=1, **options)
        left = inject(monkeypatch, root, opens, reads)
        for _ in range(1 if training else 40):
            with suppress(DataError) if training else nullcontext():  # none of them can be read
                for batch in loader:
                    assert len(batch.labels) + (0 if training else loader.left_out) == IMAGES
            if not any(left.values()):
                break
        for own in left.values():
            own.clear()
        loader.reader.begin_epoch()
        if not training:
            assert sum(len(batch.labels) for batch in loader) == IMAGES - len(BAD)
        remembered = loader.reader._undecodable
        assert remembered <= set(BAD)
        assert loader.left_out == len(remembered)


@pytest.mark.parametrize(
    ("number", "kind"), [*zip(ERRNOS, ["folder", "shards"] * 3, strict=True)], ids=str
)
def test_an_error_that_lasts_is_not_called_the_image_s(root, monkeypatch, kind, number):
    monkeypatch.setattr(reader, "_WAITS", (0, 0))
    images = source(root, kind, "val")
    options = {"batch_size": 3, "training": False, "backend": "torchvision"}
    stopping = Loader(images, SMALL, **options)
    skipping = Loader(images, SMALL, on_error="skip", **options)
    with monkeypatch.context() as patch:
        inject(patch, root, [number] * 10_000, [])
        symbol = errno.errorcode[number]
        refused(rf"cannot be read: .*\({symbol}\); the image may be", list, stopping)
        assert list(skipping) == []
    assert skipping.left_out == IMAGES
    assert sum(len(batch.labels) for batch in skipping) == IMAGES - len(BAD)
    assert skipping.left_out == len(BAD)


def test_storage_that_fails_for_all_images_ends_a_run_that_skips(root, monkeypatch):
    monkeypatch.setattr(reader, "_WAITS", (0, 0))
    monkeypatch.setattr(reader, "_MOST_UNREAD", 5)
    loader = Loader(
        source(root, "shards", "train"), SMALL, batch_size=4, on_error="skip", backend="torchvision"
    )
    inject(monkeypatch, root, [], [errno.EIO] * 10_000)
    refused(r"\(EIO\); nor can the 4 before it", list, loader)


def test_files_in_use_elsewhere_leave_room_for_reading(tmp_path):
    """With all descriptors but one in use, those that are idle are closed to open another file."""
    code = f"""
import os, resource
from largebatch.pipeline.sources.storage.local import FILES, ByteRange, LocalStorage
from tests.conftest import refused
for number in range(40):
    open(os.path.join({str(tmp_path)!r}, str(number)), "wb").write(bytes([number]))
storage = LocalStorage({str(tmp_path)!r})
ranges = [ByteRange(str(number), 0, 1) for number in range(40)]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
print(all(int(c[0]) == n for n, c in enumerate(storage.read(ranges))), FILES._count <= 16)
others = []
try:
    while True:
        others.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
print(all(int(c[0]) == n for n, c in enumerate(storage.read(ranges))), FILES._count <= 16)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "True True\nTrue True\n", result.stderr
