"""Shards on a web server or in an S3 bucket, read through fsspec by byte ranges.

Each range is one request. Many requests run concurrently, and transient failures are retried. The
bytes returned are always those requested: a server that ignores ranges would send files from their
start, and raises an error.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np

from ...errors import DataError
from ..base import Encoded
from .local import MOST_IMAGE_BYTES, MOST_INDEX_BYTES, ByteRange, Storage, too_large
from .retries import (
    NOT_FOUND,
    Failure,
    Retries,
    ShortReadError,
    WrongBytesError,
    affects_one_range,
    is_transient,
    status_of,
)
from .urls import check_complete, check_secrets, query_of, without_query

_T = TypeVar("_T")

# Object stores have a high latency and serve many requests at once.
_CONCURRENT_REQUESTS = 64
_IGNORES_RANGES = (
    "the server ignores byte ranges (HTTP header Range) and sends whole files; valid: a server "
    "that supports them"
)
# A request about a file.
_Call = tuple[str, Callable[[], Awaitable[_T]]]


class RemoteStorage(Storage):
    """The files below a URL, requested in fsspec's thread.

    Args:
        url: URL of the folder; starts with one of ``SCHEMES``. Its query, as of a signed URL, is
            sent with each request, and shown nowhere.
        options: Options of fsspec's file system, such as ``{"anon": True}`` for a public bucket.
            Defaults come from the environment: for S3 ``AWS_ACCESS_KEY_ID``, ``AWS_PROFILE``,
            ``AWS_ENDPOINT_URL``, ..., for HTTP the proxies and the user and password in netrc.
        retries: The handling of failed requests.

    Raises:
        DataError: The package for such URLs is not installed, or does not know the options, or
            the URL holds a password.
    """

    def __init__(
        self, url: str, options: dict[str, Any] | None = None, retries: Retries | None = None
    ) -> None:
        check_secrets(url)
        check_complete(url)
        self._url, self._query = without_query(url).rstrip("/"), query_of(url)
        self._is_http = not url.startswith("s3://")
        self._options = options or {}
        self._retries = retries or Retries()
        self._jitter = random.Random()  # not the global generator, which may be seeded
        self._versions: dict[str, tuple[str, str]] = {}  # ETag and date of each file, as first sent
        self._system = self._make()

    def where(self, file: str) -> str:
        return f"{self._url}/{quote(file) if self._is_http else file}"

    def sizes(self, files: Sequence[str]) -> list[int | None]:
        found = self._all((file, partial(self._size, file)) for file in files)
        return [self._succeeded(file, size) for file, size in zip(files, found, strict=True)]

    def content(self, file: str) -> bytes | None:
        (content,) = self._all([(file, partial(self._content, file))])
        return self._succeeded(file, content)

    def read(self, ranges: Sequence[ByteRange]) -> list[Encoded | str]:
        """Read byte ranges; one fails alone only as long as the server delivers others."""
        found = self._all((wanted.file, partial(self._range, wanted)) for wanted in ranges)
        failed = [number for number, what in enumerate(found) if isinstance(what, Failure)]
        if failed and len(failed) == sum(wanted.length > 0 for wanted in ranges):
            self._succeeded(ranges[failed[0]].file, found[failed[0]])
        return [
            f"cannot be read: {content}"
            if isinstance(content, Failure)
            else np.frombuffer(content, dtype=np.uint8)  # writable, since it is a bytearray
            for content in found
        ]

    def _succeeded(self, file: str, found: _T | Failure) -> _T:
        if isinstance(found, Failure):
            raise DataError(f"{self.where(file)} cannot be read: {found}") from found.error
        return found

    async def _size(self, file: str) -> int | None:
        try:
            size: int | None = (await self._system._info(self.where(file) + self._query))["size"]
        except FileNotFoundError as error:
            # Over HTTP, fsspec raises this for any failure.
            if error.__cause__ is None or status_of(error) == NOT_FOUND:
                return None
            raise
        if size is None:
            raise WrongBytesError("the server does not report its size")
        return size

    async def _content(self, file: str) -> bytes | None:
        try:
            content = await self._get(file, MOST_INDEX_BYTES)
        except FileNotFoundError:
            return None
        if len(content) > MOST_INDEX_BYTES:
            raise WrongBytesError(too_large("more", MOST_INDEX_BYTES))
        return bytes(content)

    async def _range(self, wanted: ByteRange) -> bytearray | Failure:
        if not wanted.length:
            return bytearray()
        if wanted.length > (most := MOST_IMAGE_BYTES):
            return Failure(WrongBytesError(too_large(f"{wanted.length:,}", most)), 1)
        last = wanted.offset + wanted.length - 1
        content = await self._get(wanted.file, wanted.length, f"bytes={wanted.offset}-{last}")
        if len(content) < wanted.length:
            raise ShortReadError(f"received {len(content):,} bytes instead of {wanted.length:,}")
        if len(content) > wanted.length:
            raise WrongBytesError(_IGNORES_RANGES)
        return content

    async def _get(self, file: str, most: int, span: str | None = None) -> bytearray:
        """Request a file, or a range of it, and read at most one byte more than ``most``."""
        system, address = self._system, self.where(file) + self._query
        range_ = {} if span is None else {"Range": span}
        if self._is_http:
            headers = {**system.kwargs.get("headers", {}), **range_}
            session = await system.set_session()
            request = {**system.kwargs, "headers": headers}
            async with session.get(system.encode_url(address), **request) as response:
                if response.status == NOT_FOUND:
                    raise FileNotFoundError(address)
                response.raise_for_status()
                sent = response.headers
                encoding = sent.get("Content-Encoding", "identity")
                if encoding != "identity":
                    raise WrongBytesError(
                        f"the server sends it as {encoding}; valid: without an encoding"
                    )
                _check_begin(span, sent.get("Content-Range", ""))
                self._check_version(file, sent.get("ETag", ""), sent.get("Last-Modified", ""))
                return await self._body(response.content, most)
        bucket, key, _ = system.split_path(address)
        options = {**system.req_kw, **range_}
        answer = await system._call_s3("get_object", Bucket=bucket, Key=key, **options)
        try:
            _check_begin(span, answer.get("ContentRange", ""))
            self._check_version(file, answer.get("ETag", ""))
            return await self._body(answer["Body"], most)
        finally:
            answer["Body"].close()

    def _check_version(self, file: str, tag: str, date: str = "") -> None:
        """Check that a file has not been replaced since its first response.

        Servers that mirror one another may send different tags for the same file, and some renew
        dates: it has been replaced where all that is sent both times has changed.
        """
        first = self._versions.setdefault(file, (tag, date))
        sent = [(old, new) for old, new in zip(first, (tag, date), strict=True) if old and new]
        if sent and all(old != new for old, new in sent):
            raise WrongBytesError(
                "it was replaced on the server while it was read (ETag or Last-Modified); valid: "
                "start again, after writing the index of the new shards"
            )

    async def _body(self, stream: Any, most: int) -> bytearray:
        """Read a body up to one byte more than ``most``."""
        content = bytearray()
        while piece := await stream.read(most + 1 - len(content)):
            content += piece
        return content

    def _all(self, calls: Iterable[_Call[_T]]) -> list[_T | Failure]:
        """Make all requests; raises :class:`DataError` if one fails as all others would."""
        from fsspec.asyn import sync

        found: list[_T | Failure] = sync(self._system.loop, self._gather, calls)
        return found

    async def _gather(self, calls: Iterable[_Call[_T]]) -> list[_T | Failure]:
        gate = asyncio.Semaphore(_CONCURRENT_REQUESTS)

        async def one(call: _Call[_T]) -> _T | Failure:
            async with gate:
                return await self._retry(*call)

        try:
            async with asyncio.TaskGroup() as group:  # an error cancels all others
                tasks = [group.create_task(one(call)) for call in calls]
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first from first.__cause__
        return [task.result() for task in tasks]

    async def _retry(self, file: str, make: Callable[[], Awaitable[_T]]) -> _T | Failure:
        attempt = 1
        while True:
            try:
                return await make()
            except Exception as error:
                failure = Failure(error, attempt)
                if not is_transient(error) or attempt == self._retries.attempts:
                    if affects_one_range(error):
                        return failure
                    return self._succeeded(file, failure)
            longest = self._retries.wait_seconds * 2 ** (attempt - 1)
            await asyncio.sleep(longest * self._jitter.uniform(0.5, 1.0))
            attempt += 1

    def _make(self) -> Any:
        """Return fsspec's file system."""
        try:
            return self._make_http() if self._is_http else self._make_s3()
        except ImportError as error:
            raise DataError(
                f"{self._url} needs {error.name}: pip install 'largebatch[remote]'"
            ) from error
        except (TypeError, ValueError, KeyError) as error:
            raise DataError(f"storage_options for {self._url}: {error}") from error

    def _make_http(self) -> Any:
        import aiohttp
        from fsspec.implementations.http import HTTPFileSystem

        given = self._options.get("client_kwargs", {})
        client = {
            "timeout": aiohttp.ClientTimeout(
                total=None,
                sock_connect=self._retries.connect_seconds,
                sock_read=self._retries.read_seconds,
            ),
            "trust_env": True,
            **given,
            "auto_decompress": False,
            # Content compressed by a proxy cannot be read by ranges.
            "headers": {"Accept-Encoding": "identity", **given.get("headers", {})},
        }
        options = {**self._options, "client_kwargs": client, "skip_instance_cache": True}
        return HTTPFileSystem(**options)

    def _make_s3(self) -> Any:
        from s3fs import S3FileSystem

        config = {
            "connect_timeout": self._retries.connect_seconds,
            "read_timeout": self._retries.read_seconds,
            "retries": {"total_max_attempts": 1},  # retries are made here
            "max_pool_connections": _CONCURRENT_REQUESTS,
            **self._options.get("config_kwargs", {}),
        }
        options = {**self._options, "config_kwargs": config, "skip_instance_cache": True}
        system = S3FileSystem(**options)
        system.retries = 1
        return system


def _check_begin(span: str | None, received: str) -> None:
    """Check that what is received (Content-Range) begins where the span that was requested does."""
    if span and not received.startswith(f"{span.partition('-')[0].replace('=', ' ')}-"):
        raise WrongBytesError(_IGNORES_RANGES)
