"""Servers and indexes that claim or send more than memory holds, and files that are none.

Each is opened in a process whose address space is bounded, so that what allocates too much fails.
"""

import gzip
import io
import os
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from largebatch.pipeline import Index, Retries, index_shards
from largebatch.pipeline.sources.storage import arrays, local, remote
from largebatch.pipeline.sources.storage.local import ByteRange, LocalStorage
from largebatch.pipeline.sources.storage.remote import RemoteStorage
from tests.conftest import SPECIAL, refused
from tests.pipeline.formats import packed, write_tar
from tests.pipeline.web_server import WebServer

QUICK = Retries(attempts=1, connect_seconds=5, read_seconds=2)
MOST = 10_000  # bytes of an index, in these tests


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    for module in (local, remote):
        monkeypatch.setattr(module, "MOST_INDEX_BYTES", MOST)
        monkeypatch.setattr(module, "MOST_IMAGE_BYTES", MOST)


@pytest.fixture
def server(tmp_path):
    (tmp_path / "index.npz").write_bytes(bytes(100))
    with WebServer(tmp_path) as server:
        yield server


def endless(encoding=None, span=None, piece=bytes(1 << 14), seconds=0):
    """Send pieces until the client closes the connection; count their bytes in ``sent``."""
    sent = []

    def fault(handler, content):
        handler.send_response(206 if span else 200)
        if encoding:
            handler.send_header("Content-Encoding", encoding)
        if span:
            handler.send_header("Content-Range", span)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        while not handler.server.stop.wait(seconds):
            try:
                handler.wfile.write(piece)
            except OSError:
                return
            sent.append(len(piece))

    fault.sent = sent
    return fault


def test_an_endless_body_is_cut(server):
    storage = RemoteStorage(server.url, retries=QUICK)
    message = r"index.npz cannot be read: .* valid: at most 10,000"
    server.fault = endless()
    refused(message, storage.content, "index.npz")
    assert sum(server.fault.sent) < 1 << 24
    for span in (None, "bytes 5-8/*"):
        server.fault = endless(span=span)
        refused("ignores byte ranges", storage.read, [ByteRange("index.npz", 5, 4)])
        assert sum(server.fault.sent) < 1 << 24


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_an_encoded_body_is_refused_before_it_is_unpacked(server, encoding):
    server.fault = endless(encoding, piece=gzip.compress(bytes(1 << 24)))
    storage = RemoteStorage(server.url, retries=QUICK)
    message = f"the server sends it as {encoding}; valid: without"
    refused(message, storage.content, "index.npz")


def test_a_body_that_trickles_in_is_given_up(server):
    server.fault = endless(piece=b"a", seconds=0.01)
    storage = RemoteStorage(server.url, retries=Retries(attempts=1, read_seconds=0.3))
    refused(r"index.npz cannot be read: .*imeout", storage.content, "index.npz")


def test_an_image_beyond_the_limit_is_not_requested(server, tmp_path):
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    for storage in (RemoteStorage(server.url, retries=QUICK), LocalStorage(tmp_path)):
        for length in (MOST + 1, 1 << 50):
            found = storage.read([ByteRange("sparse", 0, length), ByteRange("index.npz", 0, 4)])
            assert found[0].endswith(f"it has {length:,} bytes; valid: at most {MOST:,}")
            assert found[1].tobytes() == bytes(4)


@pytest.mark.parametrize("kind", ["FIFO", "device", "folder", "terabyte"])
def test_an_index_that_is_no_plain_file_is_refused(tmp_path, kind):
    path = tmp_path / "index.npz"
    SPECIAL[kind](path)
    storage = LocalStorage(tmp_path)
    message = rf"{path} cannot be read: .*(regular file|at most)"
    refused(message, storage.content, "index.npz")
    if kind != "terabyte":
        (found,) = storage.read([ByteRange("index.npz", 0, 4)])
        assert "not a regular file" in found


# Indexes


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    write_tar(folder / "0.tar", [("a.jpg", b"image"), ("a.cls", b"0")])
    index_shards(folder).save(folder / "index.npz")
    with np.load(folder / "index.npz") as found:
        return dict(found)


def of_header(shape, dtype, zeros=0):
    """A zip of one array: its header, and zeros after it, which are never in memory."""
    file = io.BytesIO()
    head = {"descr": dtype, "fortran_order": False, "shape": shape}
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("version.npy", "w") as member,
    ):
        np.lib.format.write_array_header_1_0(member, head)
        for size in (*[1 << 20] * (zeros >> 20), zeros % (1 << 20)):
            member.write(bytes(size))
    return file.getvalue()


def claims_less(content):
    """Change the sizes in the zip's directory, but not what it unpacks to."""
    at = content.rindex(b"PK\x01\x02")
    return content[: at + 24] + struct.pack("<L", 10) + content[at + 28 :]


HOSTILE = {
    "an array of 1.5 GB": lambda index: of_header((3 << 29,), "|u1", 3 << 29),
    "many arrays": lambda index: packed({str(n): np.zeros(1) for n in range(100)}),
    "a huge shape": lambda index: of_header((1 << 40,), "<i8"),
    "a negative shape": lambda index: of_header((-4,), "<i8", 100),
    "huge items": lambda index: of_header((4,), "|V1000000000"),
    "objects": lambda index: of_header((1,), "|O", 8),
    "a member that is longer than stated": lambda index: claims_less(of_header((9,), "<i8", 72)),
    "names of nothing": lambda index: packed(
        index | {"names": np.full(10**8, ord("\n"), np.uint8)}
    ),
    "images that are bytes": lambda index: packed(index | {"labels": np.zeros(10**8, np.uint8)}),
    "an end after the end": lambda index: packed(index) + b"PK\x05\x06" + bytes(18),
}


@pytest.mark.slow("starts a program")
def test_an_index_that_claims_too_much_is_refused_without_the_memory(tmp_path, index):
    for kind, make in HOSTILE.items():
        (tmp_path / kind).write_bytes(make(index))
    code = f"""
import resource
from pathlib import Path
from largebatch.pipeline import DataError, Index
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
for path in Path({str(tmp_path)!r}).iterdir():
    try:
        Index.load(path.read_bytes(), path.name)
    except DataError as error:
        print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    *refusals, is_small = result.stdout.splitlines()
    found = {line.partition(" is not an index of shards (")[0] for line in refusals}
    assert (found, len(refusals)) == ({*HOSTILE}, len(HOSTILE)), result.stderr
    assert is_small == "True"


def test_the_limit_of_an_index_is_that_of_its_arrays(index, monkeypatch):
    content = packed(index)
    assert len(Index.load(content, "x")) == 1
    monkeypatch.setattr(arrays, "MOST_BYTES", 100)
    refused(r"it unpacks to [\d,]+ bytes; valid: at most 100", Index.load, content, "x")
