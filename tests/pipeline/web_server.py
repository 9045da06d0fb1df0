"""A local web server of a folder, with failures on demand."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock
from urllib.parse import unquote

#: Replaces the response to a request; called with the handler and the content of the file.
Fault = Callable[["Handler", bytes], None]


class Handler(BaseHTTPRequestHandler):
    """Handles GET and HEAD, with byte ranges."""

    protocol_version = "HTTP/1.1"
    server: WebServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server = self.server
        wanted = self.headers.get("Range")
        name, _, query = self.path.partition("?")
        path = server.folder / unquote(name).lstrip("/")
        content = path.read_bytes() if path.is_file() else None
        with server.lock:
            server.requests.append((self.command, self.path, wanted))
            fault = server.faults.pop(0) if server.faults else server.fault
        if server.stop.is_set():
            reset(self, b"")
        elif fault is not None:
            fault(self, content or b"")
        elif query != server.query:
            self.answer(403, b"")
        elif content is None:
            self.answer(404, b"")
        elif wanted is None:
            self.answer(200, content)
        else:
            first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", wanted).groups())
            if first >= len(content):
                self.answer(416, b"")
            else:
                last = min(last, len(content) - 1)
                span = f"bytes {first}-{last}/{len(content)}"
                self.answer(206, content[first : last + 1], span)

    def answer(
        self, status: int, content: bytes, span: str | None = None, length: int | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        if span is not None:
            self.send_header("Content-Range", span)
        for header, value in self.server.version.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class WebServer(ThreadingHTTPServer):
    """Serves a folder, without a proxy in between."""

    daemon_threads = True
    request_queue_size = 256  # pending connections; further ones would wait for a second

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[tuple[str, str, str | None]] = []  # method, path and range of each
        self.faults: list[Fault | None] = []  # for the next requests; None responds normally
        self.fault: Fault | None = None  # for all requests after those
        self.query = ""  # that of URLs which are not refused
        self.version: dict[str, str] = {}  # headers of each response, such as ``ETag``
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._direct = mock.patch.dict(os.environ, NO_PROXY="127.0.0.1")

    def handle_error(self, *_: object) -> None:
        """Ignore clients that close the connection."""

    def __enter__(self) -> WebServer:
        self._direct.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._direct.stop()
        self.stop.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


def status(code: int) -> Fault:
    return lambda handler, content: handler.answer(code, b"")


def hang(handler: Handler, content: bytes) -> None:
    """Send nothing until the server stops."""
    handler.server.stop.wait(20)
    handler.close_connection = True


def cut_short(handler: Handler, content: bytes) -> None:
    """Announce 1000 bytes, send three, and close the connection."""
    span = handler.headers["Range"].replace("=", " ") + "/*"
    handler.answer(206, content[:3], span, length=1000)
    handler.close_connection = True


def few(handler: Handler, content: bytes) -> None:
    """Send fewer bytes than requested, with a matching length."""
    handler.answer(206, content[:3], handler.headers["Range"].replace("=", " ") + "/*")


def reset(handler: Handler, content: bytes) -> None:
    """Close the connection."""
    handler.close_connection = True


def whole(handler: Handler, content: bytes) -> None:
    """Send the whole file."""
    handler.answer(200, content)


def elsewhere(handler: Handler, content: bytes) -> None:
    """Send as many bytes as requested, from the start of the file."""
    first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
    count = last + 1 - first
    handler.answer(206, content[:count], f"bytes 0-{count - 1}/{len(content)}")
