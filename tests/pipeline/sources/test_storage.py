"""Remote storage compared with local storage, on working and on failing servers."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from largebatch.pipeline import DataError, Retries
from largebatch.pipeline.sources.storage import remote
from largebatch.pipeline.sources.storage.local import ByteRange, LocalStorage
from largebatch.pipeline.sources.storage.remote import RemoteStorage
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
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
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


# Transient failures


@pytest.mark.parametrize(
    "fault",
    [*map(status, (500, 503, 429, 408)), web_server.cut_short, web_server.few, web_server.reset],
    ids=["500", "503", "429", "408", "cut short", "few", "reset"],
)
def test_transient_failures_are_retried(server, fault):
    storage = RemoteStorage(server.url, retries=QUICK)
    server.faults = [fault, fault]
    assert as_bytes(storage.read([ByteRange("two.tar", 5, 4)])) == [CONTENT[5:9]]
    # aiohttp itself repeats a request whose connection was lost before the answer.
    assert len(server.requests) >= 3


def test_timeouts_are_retried(server):
    storage = RemoteStorage(server.url, retries=Retries(2, 0.001, 5, read_seconds=0.2))
    server.faults = [web_server.hang]
    assert as_bytes(storage.read([ByteRange("two.tar", 5, 4)])) == [CONTENT[5:9]]
    server.fault = web_server.hang
    with pytest.raises(DataError, match=r"two\.tar cannot be read: .*imeout.* \(tried 2 times\)"):
        storage.read([ByteRange("two.tar", 5, 4)])


def test_sizes_and_whole_files_are_retried(server):
    storage = RemoteStorage(server.url, retries=QUICK)
    server.faults = [status(503)] * 4  # a size is asked for in two ways
    assert storage.sizes(["two.tar"]) == [5000]
    server.faults = [status(503)] * 2
    assert storage.content("two.tar") == CONTENT


def test_waits_grow_exponentially_with_jitter(monkeypatch, server):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(remote.asyncio, "sleep", sleep)
    server.fault = status(500)
    storage = RemoteStorage(server.url, retries=Retries(attempts=6, wait_seconds=1.0))
    with pytest.raises(DataError):
        storage.read([ByteRange("two.tar", 5, 4)])
    assert len(waits) == 5
    assert all(0.5 * 2**i <= wait <= 2**i for i, wait in enumerate(waits))
    assert len({wait / 2**i for i, wait in enumerate(waits)}) == 5


# Permanent failures


@pytest.mark.parametrize(
    ("fault", "message", "requests"),
    [
        (status(404), "it does not exist", 1),
        (status(403), r"HTTP status 403 \(Forbidden\)", 1),
        (status(401), r"HTTP status 401 \(Unauthorized\)", 1),
        (status(503), r"HTTP status 503 \(Service Unavailable\) \(tried 3 times\)", 3),
        (web_server.few, r"received 3 bytes instead of 4 \(tried 3 times\)", 3),
        (web_server.whole, "the server ignores byte ranges", 1),
        (web_server.elsewhere, "the server ignores byte ranges", 1),
    ],
)
def test_permanent_failures_are_reported_with_the_url(server, fault, message, requests):
    storage = RemoteStorage(server.url, retries=QUICK)
    server.fault = fault
    with pytest.raises(DataError, match=rf"{server.url}/two\.tar cannot be read: {message}"):
        storage.read([ByteRange("two.tar", 5, 4)])
    assert len(server.requests) == requests


def test_a_server_that_ignores_ranges_is_detected_before_its_body_is_read(folder, tmp_path):
    sent = []

    def endless(handler, content):
        handler.send_response(200)
        handler.send_header("Content-Length", str(1 << 40))
        handler.end_headers()
        try:
            while not handler.server.stop.is_set():
                handler.wfile.write(bytes(1 << 16))
                sent.append(1 << 16)
        except OSError:
            handler.close_connection = True

    with WebServer(folder) as server:
        server.fault = endless
        storage = RemoteStorage(server.url, retries=QUICK)
        with pytest.raises(DataError, match=r"ignores byte ranges .* sends whole files"):
            storage.read([ByteRange("two.tar", 0, 4)])
    assert sum(sent) < 1 << 24


def test_ignoring_a_range_of_the_whole_file_is_detected(server):
    server.fault = web_server.whole
    with pytest.raises(DataError, match="ignores byte ranges"):
        RemoteStorage(server.url, retries=QUICK).read([ByteRange("two.tar", 0, 5000)])


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
    found = storage.read([ByteRange("two.tar", at, 2) for at in (99, 100, 101)])
    assert as_bytes(found) == [
        CONTENT[99:101],
        "cannot be read: HTTP status 500 (Internal Server Error) (tried 3 times)",
        CONTENT[101:103],
    ]


def test_a_range_beyond_the_end_is_reported_alone(server):
    storage = RemoteStorage(server.url, retries=QUICK)
    ranges = [ByteRange("two.tar", 0, 3), ByteRange("two.tar", 6000, 3)]
    found = storage.read([*ranges, ByteRange("two.tar", 4990, 20)])
    assert as_bytes(found)[0] == CONTENT[:3]
    assert "HTTP status 416" in found[1]
    assert found[2] == "cannot be read: received 10 bytes instead of 20 (tried 3 times)"
    with pytest.raises(DataError, match=r"two\.tar cannot be read: HTTP status 416"):
        storage.read([ByteRange("a b#1.tar", 0, 0), ranges[1]])


VERSIONS = ["ETag", "Last-Modified"]


@pytest.mark.parametrize("changed", [(), VERSIONS[:1], VERSIONS[1:], VERSIONS])
@pytest.mark.parametrize("sent", [(), VERSIONS[:1], VERSIONS[1:], VERSIONS])
def test_a_file_that_is_replaced_while_it_is_read_is_refused(server, sent, changed):
    """It is, where all that tells versions apart has changed: mirrors send tags of their own."""
    storage = RemoteStorage(server.url, retries=QUICK)
    server.version = dict.fromkeys(sent, "one")
    storage.read(RANGES)
    server.version |= {name: "two" for name in sent if name in changed}
    if sent and set(sent) <= set(changed):
        with pytest.raises(DataError, match="it was replaced on the server while it was read"):
            storage.read(RANGES)
    else:
        storage.read(RANGES)


def test_an_object_that_is_replaced_while_it_is_read_is_refused(folder, bucket, s3):
    system, name = _s3_system(bucket), "bucket/data/replaced.tar"
    system.pipe(name, CONTENT)
    storage = RemoteStorage(s3, retries=QUICK)
    storage.read([ByteRange("replaced.tar", 0, 9)])
    system.pipe(name, CONTENT[::-1])
    with pytest.raises(DataError, match="it was replaced on the server while it was read"):
        storage.read([ByteRange("replaced.tar", 0, 9)])


def test_a_server_that_dies_is_reported_without_further_requests(folder):
    ranges = [ByteRange("two.tar", at, 2) for at in range(160)]
    with WebServer(folder) as server:
        storage = RemoteStorage(server.url, retries=Retries(3, 0.2, 5, 5))
        assert len(storage.read(ranges)) == 160

        def die(handler, content):
            server.stop.set()
            handler.close_connection = True

        server.faults = [None] * 50
        server.fault = die
        with pytest.raises(DataError, match=r"two\.tar cannot be read: .* \(tried 3 times\)"):
            storage.read(ranges)


def test_a_refused_connection_is_reported(tmp_path):
    with WebServer(tmp_path) as server:
        url = server.url
    storage = RemoteStorage(url, retries=QUICK)
    for call in (
        lambda: storage.read([ByteRange("x", 0, 1)]),
        lambda: storage.sizes(["x"]),
        lambda: storage.content("x"),
    ):
        with pytest.raises(DataError, match=rf"{url}/x cannot be read: .*111.*\(tried 3 times\)"):
            call()


# S3


def test_s3_failures_are_reported(s3):
    storage = RemoteStorage(s3, retries=QUICK)
    with pytest.raises(DataError, match=r"s3://bucket/data/none cannot be read: it does not exist"):
        storage.read([ByteRange("none", 0, 1)])
    found = storage.read([ByteRange("two.tar", 0, 3), ByteRange("two.tar", 6000, 3)])
    assert "HTTP status 416" in found[1]
    assert RemoteStorage("s3://no-such-bucket/x", retries=QUICK).sizes(["y"]) == [None]


def test_s3_failures_are_retried(folder):
    """A plain web server serves S3 reads without credentials."""
    with WebServer(folder.parent) as server:
        options = {"anon": True, "endpoint_url": server.url}
        storage = RemoteStorage(f"s3://{folder.name}", options, QUICK)
        server.faults = [status(500), status(503)]
        assert as_bytes(storage.read([ByteRange("two.tar", 5, 4)])) == [CONTENT[5:9]]
        assert len(server.requests) == 3
        server.faults = [web_server.cut_short, web_server.reset]
        assert as_bytes(storage.read([ByteRange("two.tar", 5, 4)])) == [CONTENT[5:9]]
        server.requests.clear()
        server.fault = status(403)
        with pytest.raises(DataError, match=r"two\.tar cannot be read: HTTP status 403"):
            storage.read([ByteRange("two.tar", 5, 4)])
        assert len(server.requests) == 1
        server.fault = status(503)
        with pytest.raises(DataError, match=r"HTTP status 503 .*\(tried 3 times\)"):
            storage.read([ByteRange("two.tar", 5, 4)])
        server.fault = web_server.whole
        with pytest.raises(
            DataError, match=r"two\.tar cannot be read: the server ignores byte ranges"
        ):
            storage.read([ByteRange("two.tar", 5, 4)])
    with pytest.raises(DataError, match=r"two\.tar cannot be read: .*\(tried 3 times\)"):
        storage.read([ByteRange("two.tar", 5, 4)])


def test_s3_without_credentials(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(DataError, match=r"two\.tar cannot be read: .*credentials"):
        RemoteStorage("s3://bucket/data", retries=QUICK).read([ByteRange("two.tar", 0, 1)])


# Processes


@pytest.mark.slow("starts a program")
@pytest.mark.parametrize("where", ["local", "http", "s3"])
def test_a_forked_process_can_read(folder, server, s3, where):
    """In a program of its own: pipelines of DALI that other tests left here do not bear a fork."""
    place = {"local": str(folder), "http": server.url, "s3": s3}[where]
    code = f"""
import multiprocessing
storage = {"Local" if where == "local" else "Remote"}Storage({place!r})
def read():
    return [c if isinstance(c, str) else c.tobytes() for c in storage.read({RANGES!r})]
before = read()
context = multiprocessing.get_context("fork")
out = context.Queue()
child = context.Process(target=lambda: out.put(read()))
child.start()
print(before == out.get(timeout=120) == read())
child.join(120)
print(before, child.exitcode)
"""
    result = _program(code)
    assert result.stdout == f"True\n{EXPECTED[3]} 0\n", result.stderr


@pytest.mark.slow("starts a program")
def test_a_process_exits_without_warnings(server, s3):
    code = f"""
for url in ({server.url!r}, {s3!r}):
    storage = RemoteStorage(url)
    print(storage.read([ByteRange("two.tar", 0, 4)])[0].tobytes())
"""
    result = _program(code, "-W", "always::ResourceWarning")
    assert result.stdout == f"{CONTENT[:4]!r}\n" * 2, result.stderr
    assert result.stderr == ""


def _program(code, *options):
    """Run code that reads storage in a process of its own."""
    import largebatch

    code = f"""
from largebatch.pipeline.sources.storage.local import ByteRange, LocalStorage
from largebatch.pipeline.sources.storage.remote import RemoteStorage
{code}"""
    paths = [str(Path(largebatch.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(DataError, match=r"s3://b needs s3fs: pip install 'largebatch\[remote\]'"):
        RemoteStorage("s3://b")
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(DataError, match=r"http://b needs aiohttp: pip install 'largebatch\[remote"):
        RemoteStorage("http://b")


def test_unknown_options_are_named(server, s3):
    with pytest.raises(DataError, match="attempts is 0; valid: at least 1"):
        Retries(attempts=0)
    for url in (server.url, s3):
        with pytest.raises(DataError, match=rf"{url}.* cannot be read: TypeError .*'nonsense'"):
            RemoteStorage(url, {"nonsense": 1}).sizes(["two.tar"])


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
