"""The context of a forward pass, which is a decorator too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any


class ForwardContext(ContextDecorator):
    """What :meth:`~largebatch.amp.Precision.forward` returns; it may be entered again and again.

    Args:
        begin: begins a forward pass, and returns the context to compute it in.
    """

    def __init__(self, begin: Callable[[], AbstractContextManager[Any]]) -> None:
        self._begin = begin
        self._entered: list[AbstractContextManager[Any]] = []

    def _recreate_cm(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self._begin()  # for each call of a decorated function, in whatever thread

    def __enter__(self) -> None:
        context = self._begin()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)
