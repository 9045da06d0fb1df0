"""The exception for faults in the data, as opposed to faults in the code, and names in messages."""

from __future__ import annotations


class DataError(Exception):
    """Raised for data that cannot be used; the message names the file or folder and the fix."""


def printable(text: str) -> str:
    """Return a name or a message with bytes such as ``%0A`` in place of what a terminal obeys.

    These are control characters, line breaks, invisible characters and bytes that are not UTF-8,
    which Python reads from a file system as surrogates: ``caf%E9``. The result is valid UTF-8, and
    has no backslashes that could be taken for folders. All other text, percent signs included,
    stays as it is, so that twice is the same as once.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    code = ord(character) - 0xDC00  # of a byte that is not UTF-8, by PEP 383
    content = bytes([code]) if 0x80 <= code <= 0xFF else character.encode("utf-8", "surrogatepass")
    return "".join(f"%{byte:02X}" for byte in content)
