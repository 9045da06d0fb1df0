"""Secrets in URLs: where they are refused, and how they are left out of what is shown or stored."""

from __future__ import annotations

import re

from ...errors import DataError

#: Supported URL schemes.
SCHEMES = ("http://", "https://", "s3://")

_HIDDEN = "***"
_URL = re.compile(
    r"""([a-z][a-z0-9+.-]*://)
    # User and password; a password may hold slashes, a port has digits only.
    ([^\s/?#:@'"]*:(?!\d+[/?#])[^\s'"]*@ | [^\s/?#@'"]*@)?
    ([^\s?#'"]*)  # host and path
    ([?#][^\s'"]*)?""",
    re.IGNORECASE | re.VERBOSE,
)


def without_secrets(text: str) -> str:
    """Return a text with ``***`` for user, password and query of each URL in it.

    The query of a signed URL is a password too (``X-Amz-Signature``, ``sig``, ``token``).
    """

    def hide(url: re.Match[str]) -> str:
        scheme, user, place, query = url.groups()
        if user and set(user) & set("/?#"):  # where the password ends is a guess
            return f"{scheme}{_HIDDEN}"
        hidden = f"{_HIDDEN}@" if user else "", f"?{_HIDDEN}" if query else ""
        return f"{scheme}{hidden[0]}{place}{hidden[1]}"

    return _URL.sub(hide, text)


def without_query(path: str) -> str:
    """Return a path without secrets, of a URL without its query too."""
    return without_secrets(path).partition(f"?{_HIDDEN}")[0]


def query_of(url: str) -> str:
    """Return the query of a URL with its question mark, which each of its requests needs."""
    found = _URL.match(url)
    return (found[4] or "") if found else ""


def check_secrets(path: str) -> None:
    """Check that a path is no URL with a user or password.

    Raises:
        DataError: It is; the message says where credentials belong.
    """
    found = _URL.match(path)
    if found and found[2]:
        raise DataError(
            f"{without_secrets(path)} holds a user or password, which would be stored; valid: the "
            "URL without them, and for http and https a netrc file (NETRC names it, else "
            "~/.netrc), for s3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        )


def check_complete(url: str) -> None:
    """Check that a URL still has its query, which files of a run do not hold."""
    if query_of(url) == f"?{_HIDDEN}":
        raise DataError(
            f"{url} is without its query, which runs do not store; valid: data.path=URL, with it"
        )
