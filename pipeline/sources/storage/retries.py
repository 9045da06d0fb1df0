"""Which failures of a server may pass, what is done about them, and how they are told."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import DataError

NOT_FOUND = 404
_REQUEST_TIMEOUT, _NOT_SATISFIABLE, _TOO_MANY = 408, 416, 429
_ERRORS, _SERVER_ERRORS = 300, 500


@dataclass(frozen=True)
class Retries:
    """What is done about a request that fails.

    Args:
        attempts: how often it is made in all, at least 1.
        wait_seconds: before the second attempt, at most; doubles with each further one.
        connect_seconds: for a connection to be made.
        read_seconds: for the next bytes to come.
    """

    attempts: int = 5
    wait_seconds: float = 1.0
    connect_seconds: float = 10.0
    read_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise DataError(f"{self.attempts} attempts to read: at least 1 is wanted")


class UnwantedError(Exception):
    """The answer holds other bytes than were asked for."""


class ShortError(Exception):
    """The answer holds fewer bytes than were asked for."""


@dataclass(frozen=True)
class Failure:
    """A request that failed, and that is not to be made again.

    Attributes:
        error: of the last attempt.
        attempts: that were made.
    """

    error: Exception
    attempts: int

    def __str__(self) -> str:
        times = f" (tried {self.attempts} times)" if self.attempts > 1 else ""
        return f"{_reason(self.error)}{times}"


def _causes(error: BaseException) -> list[BaseException]:
    """An error and what it came of: libraries wrap them in their own."""
    found = [error]
    while (cause := found[-1].__cause__) is not None:
        found.append(cause)
    return found


def status_of(error: Exception) -> int | None:
    """The status of the answer of HTTP, where there was an answer."""
    for cause in _causes(error):
        status = getattr(cause, "status", None)  # of aiohttp
        response = getattr(cause, "response", None)  # of botocore
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(status, int):
            return status
    return None


def may_pass(error: Exception) -> bool:
    """Whether it is worth trying again."""
    status = status_of(error)
    # An answer may break off after the head, with a status of success.
    if status is not None and status >= _ERRORS:
        return status in (_REQUEST_TIMEOUT, _TOO_MANY) or status >= _SERVER_ERRORS
    passing: tuple[type[BaseException], ...] = (ShortError, TimeoutError, ConnectionError)
    try:
        import aiohttp

        passing += (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
        from botocore import exceptions

        passing += (
            exceptions.ConnectionError,
            exceptions.HTTPClientError,
            exceptions.IncompleteReadError,
            exceptions.ResponseStreamingError,
        )
    except ImportError:
        pass  # s3fs is not needed for http
    return any(isinstance(cause, passing) for cause in _causes(error))


def is_of_one_range(error: Exception) -> bool:
    """Whether others may be read all the same: the server answered, but not with these bytes."""
    status = status_of(error) or 0
    return isinstance(error, ShortError) or status == _NOT_SATISFIABLE or status >= _SERVER_ERRORS


def _reason(error: Exception) -> str:
    """In a few words."""
    status = status_of(error)
    if status is not None and status >= _ERRORS and status != NOT_FOUND:
        message = next((m for c in _causes(error) if (m := getattr(c, "message", None))), error)
        return f"HTTP status {status} ({message})"
    if status == NOT_FOUND or (isinstance(error, FileNotFoundError) and error.__cause__ is None):
        return "it is not there"
    root = next((cause for cause in reversed(_causes(error)) if str(cause)), error)
    told = str(root)
    plain = told and isinstance(root, UnwantedError | ShortError | OSError)
    return told if plain else f"{type(root).__name__} {told}".strip()
