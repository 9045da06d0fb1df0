"""Remote storage compared with local storage, on working and on failing servers."""

import logging
import os
import sys

import numpy as np
import pytest

from largebatch.pipeline import Retries
from largebatch.pipeline.sources.storage import local, remote
from largebatch.pipeline.sources.storage.local import ByteRange, LocalStorage
from largebatch.pipeline.sources.storage.remote import RemoteStorage
from tests.conftest import refused
from tests.pipeline import web_server
from tests.pipeline.web_server import WebServer, status

QUICK = Retries(attempts=3, wait_seconds=0.002, connect_seconds=5, read_seconds=5)
CONTENT = bytes(np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8))
RANGES = [
    ByteRange("a b#1.tar", 0, 10),
    ByteRange("two.tar", 4000, 1000),
    ByteRange("two.tar", 7, 0),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "a b#1.tar").write_bytes(CONTENT[::-1])
    (folder / "two.tar").write_bytes(CONTENT)
    return folder


@pytest.fixture(autouse=True)
def _direct(monkeypatch):
    """Use no proxy and no credentials of the environment."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def server(folder):
    with WebServer(folder) as server:
        yield server


@pytest.fixture(scope="session")
def bucket(folder):
    """Copy the files to a bucket of moto's S3 server; return its endpoint.

    Once in a process: all of its servers have the same buckets.
    """
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    system = _s3_system(endpoint)
    system.mkdir("bucket")
    for path in folder.iterdir():
        system.pipe(f"bucket/data/{path.name}", path.read_bytes())
    yield endpoint
    server.stop()


def _s3_system(endpoint):
    from s3fs import S3FileSystem

    return S3FileSystem(key="k", secret="s", endpoint_url=endpoint, skip_instance_cache=True)


@pytest.fixture
def s3(bucket, monkeypatch):
    """Set credentials in the environment; return the URL of the files."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "k")
    return "s3://bucket/data"


def as_bytes(found):
    return [content if isinstance(content, str) else content.tobytes() for content in found]


def read_all(storage):
    found = storage.read(RANGES)
    assert all(content.flags.writeable and content.dtype == np.uint8 for content in found)
    missing = storage.content("none.npz")
    return storage.sizes(["two.tar", "none"]), storage.content("two.tar"), missing, as_bytes(found)


EXPECTED = ([5000, None], CONTENT, None, [CONTENT[::-1][:10], CONTENT[4000:], b""])


def test_local_http_and_s3_storage_read_the_same_bytes(folder, server, s3):
    assert read_all(LocalStorage(folder)) == EXPECTED
    assert read_all(RemoteStorage(server.url, retries=QUICK)) == EXPECTED
    assert read_all(RemoteStorage(s3, retries=QUICK)) == EXPECTED
    ranges = [request for request in server.requests if request[2] is not None]
    assert sorted(ranges) == [
        ("GET", "/a%20b%231.tar", "bytes=0-9"),
        ("GET", "/two.tar", "bytes=4000-4999"),
    ]


def test_an_index_and_an_image_beyond_the_limits_are_refused(folder, server, monkeypatch):
    for module, name in ((m, n) for m in (local, remote) for n in ("INDEX", "IMAGE")):
        monkeypatch.setattr(module, f"MOST_{name}_BYTES", 4000)
    for storage in (LocalStorage(folder), RemoteStorage(server.url, retries=QUICK)):
        message = r"two\.tar cannot be read: it has .* bytes; valid: at most 4,000"
        refused(message, storage.content, "two.tar")
        too_large, found = storage.read([ByteRange("two.tar", 0, 4001), *FOUR])
        assert too_large == "cannot be read: it has 4,001 bytes; valid: at most 4,000"
        assert found.tobytes() == CONTENT[5:9]


# Transient failures


@pytest.fixture(params=["http", "s3"])
def both(request, folder):
    """A web server, and storage on it by HTTP or, without credentials, by S3."""
    with WebServer(folder.parent) as server:
        if request.param == "http":
            yield server, RemoteStorage(f"{server.url}/{folder.name}", retries=QUICK)
        else:
            options = {"anon": True, "endpoint_url": server.url}
            yield server, RemoteStorage(f"s3://{folder.name}", options, QUICK)


FOUR = [ByteRange("two.tar", 5, 4)]
TRANSIENT = {
    **{str(code): status(code) for code in (503, 429)},
    **{f.__name__: f for f in (web_server.cut_short, web_server.reset)},
}


@pytest.mark.parametrize("fault", TRANSIENT)
def test_transient_failures_are_retried(both, fault):
    server, storage = both
    server.faults = [TRANSIENT[fault]] * 2
    assert as_bytes(storage.read(FOUR)) == [CONTENT[5:9]]
    # aiohttp itself repeats a request whose connection was lost before the answer.
    assert len(server.requests) >= 3
    server.faults = [TRANSIENT[fault]] * 2 if fault != "cut_short" else []
    assert storage.content("two.tar") == CONTENT
    server.faults = [status(503)] * 2
    assert storage.sizes(["two.tar"]) == [5000]


def test_timeouts_are_retried(server):
    storage = RemoteStorage(server.url, retries=Retries(2, 0.001, 5, read_seconds=0.2))
    server.faults = [web_server.hang]
    assert as_bytes(storage.read(FOUR)) == [CONTENT[5:9]]
    server.fault = web_server.hang
    refused(r"two\.tar cannot be read: .*imeout.* \(tried 2 times\)", storage.read, FOUR)


def test_waits_grow_exponentially_with_jitter(monkeypatch, server):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(remote.asyncio, "sleep", sleep)
    server.fault = status(500)
    storage = RemoteStorage(server.url, retries=Retries(attempts=6, wait_seconds=1.0))
    refused("tried 6 times", storage.read, FOUR)
    assert len(waits) == 5
    assert all(0.5 * 2**i <= wait <= 2**i for i, wait in enumerate(waits))
    assert len({wait / 2**i for i, wait in enumerate(waits)}) == 5


# Permanent failures


PERMANENT = {
    "404": (status(404), "it does not exist", 1),
    "403": (status(403), r"HTTP status 403 \(", 1),
    "401": (status(401), r"HTTP status 401 \(", 1),
    "503": (status(503), r"HTTP status 503 .*\(tried 3 times\)", 3),
    "few": (web_server.few, r"received 3 bytes instead of 4 \(tried 3 times\)", 3),
    "whole": (web_server.whole, "the server ignores byte ranges", 1),
}


@pytest.mark.parametrize("name", PERMANENT)
def test_permanent_failures_are_reported_with_the_url(both, name):
    server, storage = both
    server.fault, message, requests = PERMANENT[name]
    refused(rf"{storage.where('two.tar')} cannot be read: {message}", storage.read, FOUR)
    assert len(server.requests) == requests
    if name == "503":
        refused(message, storage.sizes, ["two.tar"])
    if name == "whole":  # also where it has as many bytes as were asked for
        refused(message, storage.read, [ByteRange("two.tar", 0, 5000)])
        server.fault = web_server.elsewhere
        refused(message, storage.read, FOUR)


def test_a_redirect_to_other_schemes_and_an_encoded_body_are_refused(server, folder):
    """The file of the redirect exists and has the wanted bytes: only the scheme is wrong."""
    storage, target = RemoteStorage(server.url, retries=QUICK), f"file://{folder}/two.tar"
    server.faults, server.version = [status(302)], {"Location": f"{server.url}/two.tar"}
    assert as_bytes(storage.read(FOUR)) == [CONTENT[5:9]]
    server.version = {"Content-Encoding": "gzip"}
    refused("the server sends it as gzip; valid: without", storage.content, "two.tar")
    server.fault, server.version = status(302), {"Location": target}
    message = rf"two\.tar cannot be read: the server redirects to {target}; valid: http and https"
    refused(message, storage.read, FOUR)
    refused(message, storage.sizes, ["two.tar"])


def test_a_range_that_fails_alone_is_reported_alone(server):
    storage = RemoteStorage(server.url, retries=QUICK)

    def fail_here(handler, content):
        first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        if first == 100:
            handler.answer(500, b"")
        else:
            span = f"bytes {first}-{last}/{len(content)}"
            handler.answer(206, content[first : last + 1], span)

    server.fault = fail_here
    ranges = [ByteRange("two.tar", at, 20) for at in (99, 100, 4990)]
    assert as_bytes(storage.read(ranges)) == [
        CONTENT[99:119],
        "cannot be read: HTTP status 500 (Internal Server Error) (tried 3 times)",
        "cannot be read: received 10 bytes instead of 20 (tried 3 times)",
    ]
    server.fault, beyond = None, ByteRange("two.tar", 6000, 3)
    assert "HTTP status 416" in storage.read([ranges[0], beyond])[1]
    message = r"two\.tar cannot be read: HTTP status 416"
    refused(message, storage.read, [ByteRange("a b#1.tar", 0, 0), beyond])


VERSIONS = ["ETag", "Last-Modified"]


def test_a_file_that_is_replaced_while_it_is_read_is_refused(server):
    """It is, where all that tells versions apart has changed: mirrors send tags of their own."""
    for sent, changed in (
        ((), VERSIONS),
        (VERSIONS[:1], VERSIONS[:1]),
        (VERSIONS[1:], VERSIONS),
        (VERSIONS, VERSIONS[:1]),
        (VERSIONS, VERSIONS),
    ):
        storage = RemoteStorage(server.url, retries=QUICK)
        server.version = dict.fromkeys(sent, "one")
        storage.read(RANGES)
        server.version |= {name: "two" for name in sent if name in changed}
        if sent and set(sent) <= set(changed):
            refused("it was replaced on the server while it was read", storage.read, RANGES)
        else:
            storage.read(RANGES)


def test_a_refused_connection_is_reported(tmp_path):
    with WebServer(tmp_path) as server:
        url = server.url
    options = {"anon": True, "endpoint_url": url}
    for storage in (RemoteStorage(url, None, QUICK), RemoteStorage("s3://b", options, QUICK)):
        for call in (storage.content, lambda name, storage=storage: storage.sizes([name])):
            refused(rf"{storage.where('x')} cannot be read: .*\(tried 3 times\)", call, "x")


# S3


def test_s3_failures_are_reported(bucket, s3, monkeypatch):
    storage = RemoteStorage(s3, retries=QUICK)
    system, replaced = _s3_system(bucket), [ByteRange("replaced.tar", 0, 9)]
    system.pipe("bucket/data/replaced.tar", CONTENT)
    storage.read(replaced)
    system.pipe("bucket/data/replaced.tar", CONTENT[::-1])
    refused("it was replaced on the server while it was read", storage.read, replaced)
    message = r"s3://bucket/data/none cannot be read: it does not exist"
    refused(message, storage.read, [ByteRange("none", 0, 1)])
    found = storage.read([ByteRange("two.tar", 0, 3), ByteRange("two.tar", 6000, 3)])
    assert "HTTP status 416" in found[1]
    assert RemoteStorage("s3://no-such-bucket/x", retries=QUICK).sizes(["y"]) == [None]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    storage = RemoteStorage(s3, retries=QUICK)
    refused(r"two\.tar cannot be read: .*credentials", storage.read, FOUR)


def test_missing_packages_and_unknown_options_are_named(monkeypatch, server, s3):
    refused("attempts is 0; valid: at least 1", Retries, attempts=0)
    for url in (server.url, s3):
        storage = RemoteStorage(url, {"nonsense": 1})
        refused(f"{url}.* cannot be read: TypeError .*'nonsense'", storage.sizes, ["two.tar"])
    for name, url in (("s3fs", "s3://b"), ("aiohttp", "http://b")):
        monkeypatch.setitem(sys.modules, name, None)
        message = rf"{url} needs {name}: pip install 'largebatch\[remote\]'"
        refused(message, RemoteStorage, url)


def test_options_reach_the_server(server):
    seen = []

    def look(handler, content):
        seen.append((handler.headers["Authorization"], handler.headers["Accept-Encoding"]))
        handler.answer(200, content)

    server.fault = look
    for options in (
        {"headers": {"Authorization": "token"}},
        {"client_kwargs": {"headers": {"Authorization": "token"}}},
    ):
        RemoteStorage(server.url, options, QUICK).content("two.tar")
    assert seen == [("token", "identity")] * 2
