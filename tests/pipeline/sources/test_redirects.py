"""Redirects of a web server: to web servers they are followed, to anything else refused."""

import pytest

from largebatch.pipeline import DataError, Retries
from largebatch.pipeline.sources.storage.local import ByteRange
from largebatch.pipeline.sources.storage.remote import RemoteStorage
from tests.pipeline import web_server

QUICK = Retries(attempts=3, wait_seconds=0.002, connect_seconds=5, read_seconds=5)


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "two.tar").write_bytes(bytes(range(200)))
    with web_server.WebServer(folder) as server:
        yield server


@pytest.mark.parametrize("scheme", ["file", "ftp", "data", "s3"])
def test_a_redirect_to_another_scheme_is_refused(server, tmp_path, scheme):
    """The file exists and has the wanted bytes: only the scheme is wrong."""
    (tmp_path / "local.tar").write_bytes(b"0123456789")
    target = f"{scheme}://{tmp_path}/local.tar"
    server.fault = web_server.redirect(target)
    storage = RemoteStorage(server.url, retries=QUICK)
    message = rf"two\.tar cannot be read: the server redirects to {target}; valid: http and https"
    for read in (
        lambda: storage.read([ByteRange("two.tar", 5, 4)]),
        lambda: storage.content("two.tar"),
        lambda: storage.sizes(["two.tar"]),
    ):
        with pytest.raises(DataError, match=message):
            read()
    assert [path for _, path, _ in server.requests] == ["/two.tar"] * len(server.requests)


def test_a_redirect_to_a_web_server_is_followed(server):
    """A redirect within http, as of a download site to its mirror."""
    storage = RemoteStorage(server.url, retries=QUICK)
    (wanted,) = storage.read([ByteRange("two.tar", 5, 4)])
    server.faults = [web_server.redirect(f"{server.url}/two.tar")]
    (found,) = storage.read([ByteRange("two.tar", 5, 4)])
    assert found.tobytes() == wanted.tobytes()
