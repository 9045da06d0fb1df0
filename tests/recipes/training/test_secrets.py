"""Passwords and signatures in URLs: in no file of a run, and on no screen."""

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from largebatch.pipeline import DataError, Output, Shards, prepare_folder, without_secrets
from largebatch.pipeline.sources.storage.remote import RemoteStorage
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.schema.load import load
from largebatch.recipes.schema.names import RECIPE
from largebatch.recipes.training.trainer import Trainer
from tests.pipeline.web_server import WebServer
from tests.recipes.commands.test_app import run
from tests.recipes.runs import JOB, refused, train

SECRET = "s3cr3t/Zm9v"
QUERY = f"sv=2024&X-Amz-Signature={SECRET}&token={SECRET}"

_PLACES = st.sampled_from(["host", "host:8080", "host.org/a/b", "[::1]:80/x", "bucket/t@g"])
_SECRETS = st.text("sS3?#/:@&=%+-_.~", min_size=1).map(lambda text: f"0pen{text}S3same")


@given(
    scheme=st.sampled_from(["http", "https", "HTTPS", "s3", "ftp"]),
    place=_PLACES,
    password=st.none() | _SECRETS,
    query=st.none() | _SECRETS,
    around=st.sampled_from(["{}", "x {} y", "url='{}': z", "data.path={}"]),
)
def test_secrets_are_hidden_wherever_a_url_stands(scheme, place, password, query, around):
    user = f"user:{password}@" if password else ""
    url = f"{scheme}://{user}{place}{f'?{query}' if query else ''}"
    hidden = without_secrets(around.format(url))
    assert "0pen" not in hidden
    assert "S3same" not in hidden
    assert without_secrets(hidden) == hidden
    if not password and not query:
        assert hidden == around.format(url)


@pytest.mark.parametrize("url", ["https://s3cr3tZm9v@host/x", f"s3://AKIA:{SECRET}@bucket/x"])
def test_a_password_in_a_url_is_refused_with_what_is_valid(url):
    for kind, make in (
        (RecipeError, lambda: load("digits", ["data.source=webdataset", f"data.path={url}"])),
        (DataError, lambda: RemoteStorage(url)),
        (DataError, lambda: Shards(url, format="webdataset")),
    ):
        message = refused(make, kind=kind)
        assert re.search(r"NETRC.*AWS_ACCESS_KEY_ID", message)
        assert "s3cr3t" not in message
    for key in ("", "data.path=", "data.source="):  # a mistake; data.path is that of a folder
        assert "s3cr3t" not in refused(load, "digits", [f"{key}https://host/x?sig={SECRET}"])


def test_credentials_in_netrc_reach_a_web_server(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login u password p\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    seen = []

    def look(handler, content):
        seen.append(handler.headers["Authorization"])
        handler.answer(200, b"x")

    with WebServer(tmp_path) as server:
        server.fault = look
        assert RemoteStorage(server.url).content("index.npz") == b"x"
    assert seen == ["Basic dTpw"]


@pytest.mark.slow("trains, evaluates, exports and reports a small network")
def test_no_file_and_no_screen_of_a_run_holds_the_query_of_its_url(
    photos, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    shards, folder = tmp_path / "shards", tmp_path / "run"
    prepare_folder(shards, photos, Output("webdataset"))
    screens = []

    def call(*arguments):
        done = run(*arguments)
        assert done.exit_code == 0, done.output
        screens.append(done.output)

    with WebServer(shards) as server:
        server.query = QUERY
        url = f"{server.url}?{QUERY}"
        options = ["data.source=webdataset", "checkpoint.every=2", "epochs=1"]
        train(url, folder, *options, "stop_after=2")
        stored = folder / RECIPE
        assert yaml.safe_load(stored.read_text())["data"]["path"] == f"{server.url}?***"
        # The query is not stored: a resume from the run's own recipe needs it again.
        again = ["resume=true", "stop_after=null"]
        assert "valid: data" in refused(lambda: Trainer.of(load(str(stored), again), JOB))
        Trainer.of(load(str(stored), [*again, f"data.path={url}"]), JOB).run()
        call("evaluate", folder, f"data.path={url}")
        call("export", folder, "--to", "safetensors", "--out", tmp_path / "export")
        call("report", folder, "--out", tmp_path / "report.html")
        server.query = "sv=2025"
        message = refused(RemoteStorage(url).sizes, ["train/index.npz"], kind=DataError)
    assert "HTTP status 403" in message
    screens += [*capfd.readouterr(), message]
    assert f"webdataset {server.url}," in "".join(screens)
    assert "s3cr3t" not in "".join(screens)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and shards not in path.parents]
    assert {RECIPE, "metrics.jsonl", "README.md", "weights.pt"} <= {path.name for path in files}
    assert any(folder / "checkpoints" in path.parents for path in files)
    # Checkpoints are zips whose members are not compressed, so their text is found.
    assert [path for path in files if b"s3cr3t" in path.read_bytes()] == []
