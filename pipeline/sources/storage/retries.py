"""Failed requests: which of them are transient, how they are retried, and their messages."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import DataError
from .urls import without_secrets

NOT_FOUND = 404
_REQUEST_TIMEOUT, _NOT_SATISFIABLE, _TOO_MANY = 408, 416, 429
_ERRORS, _SERVER_ERRORS = 300, 500


@dataclass(frozen=True)
class Retries:
    """The handling of failed requests."""

    attempts: int = 5  #: Greatest number of attempts in all, at least 1.
    wait_seconds: float = 1.0  #: Longest wait before the second attempt; doubles with each one.
    connect_seconds: float = 10.0  #: Timeout for establishing a connection.
    read_seconds: float = 30.0  #: Timeout for receiving the next bytes.

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise DataError(f"attempts is {self.attempts}; valid: at least 1")


class WrongBytesError(Exception):
    """Raised for a response with other bytes than requested."""


class ShortReadError(Exception):
    """Raised for a response with fewer bytes than requested."""


@dataclass(frozen=True)
class Failure:
    """A request that has failed for good: the error of the last of several attempts."""

    error: Exception
    attempts: int

    def __str__(self) -> str:
        times = f" (tried {self.attempts} times)" if self.attempts > 1 else ""
        return without_secrets(f"{_reason(self.error)}{times}")


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error and its chain of causes, since libraries wrap errors in their own."""
    found = [error]
    while (cause := found[-1].__cause__) is not None:
        found.append(cause)
    return found


def status_of(error: Exception) -> int | None:
    """Return the HTTP status of the response; None if there was no response."""
    for cause in _causes(error):
        status = getattr(cause, "status", None)  # of aiohttp
        response = getattr(cause, "response", None)  # of botocore
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(status, int):
            return status
    return None


def is_transient(error: Exception) -> bool:
    """Whether the request may succeed when it is repeated."""
    status = status_of(error)
    # A response may break off after its headers, with a status of success.
    if status is not None and status >= _ERRORS:
        return status in (_REQUEST_TIMEOUT, _TOO_MANY) or status >= _SERVER_ERRORS
    transient: tuple[type[BaseException], ...] = (ShortReadError, TimeoutError, ConnectionError)
    try:
        import aiohttp

        transient += (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
        from botocore import exceptions

        transient += (
            exceptions.ConnectionError,
            exceptions.HTTPClientError,
            exceptions.IncompleteReadError,
            exceptions.ResponseStreamingError,
        )
    except ImportError:
        pass  # s3fs is not needed for HTTP
    return any(isinstance(cause, transient) for cause in _causes(error))


def affects_one_range(error: Exception) -> bool:
    """Whether other ranges may still be readable: the server was reached, but did not send this."""
    status = status_of(error) or 0
    return (
        isinstance(error, ShortReadError | TimeoutError)
        or status == _NOT_SATISFIABLE
        or status >= _SERVER_ERRORS
    )


def _reason(error: Exception) -> str:
    """Describe an error in a few words."""
    status = status_of(error)
    if status is not None and status >= _ERRORS and status != NOT_FOUND:
        message = next((m for c in _causes(error) if (m := getattr(c, "message", None))), error)
        return f"HTTP status {status} ({message})"
    if status == NOT_FOUND or (isinstance(error, FileNotFoundError) and error.__cause__ is None):
        return "it does not exist"
    root = next((cause for cause in reversed(_causes(error)) if str(cause)), error)
    text = str(root)
    if type(root).__name__ == "NonHttpUrlRedirectClientError":  # of aiohttp: a scheme such as file
        return f"the server redirects to {text}; valid: http and https"
    plain = text and isinstance(root, WrongBytesError | ShortReadError | OSError)
    return text if plain else f"{type(root).__name__} {text}".strip()
