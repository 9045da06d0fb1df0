"""What tells whether ranks run the same code on the same model: versions, sources and shapes.

Not the values of initial weights: DDP broadcasts rank 0's, and they differ between kinds of CPU.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from ..schema.dotted_path import is_dotted_path

_ROOMS = ("lars", "amp", "comm", "pipeline", "recipes")
_DIGITS = 16


def code_facts(recipe: dict[str, Any], model: nn.Module) -> dict[str, str]:
    """Return what must be the same on all ranks, by name.

    Args:
        recipe: The recipe as JSON can hold it; the modules of its dotted paths are imported.
        model: The model of this rank.
    """
    facts = {f"the version of {name}": version(name) for name in ("torch", "timm")}
    files = [path for room in _ROOMS for path in _sources(room)]
    facts["the source of largebatch"] = _digest(path.read_bytes() for path in files)
    for name in sorted({*_modules(recipe)}):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and Path(file).is_file():
            facts[f"the source of {name}"] = _digest([Path(file).read_bytes()])
    tensors = (*model.named_parameters(), *model.named_buffers())
    shapes = (f"{name} {[*tensor.shape]} {tensor.dtype}".encode() for name, tensor in tensors)
    facts["the parameters and buffers of the model"] = _digest(shapes)
    return facts


def _sources(room: str) -> list[Path]:
    """The files of a room, in the order of their names in it."""
    (folder,) = import_module(f"largebatch.{room}").__path__
    return sorted(Path(folder).rglob("*.py"))


def _modules(content: Any) -> Iterator[str]:
    """Yield the modules of the dotted paths in a recipe."""
    if isinstance(content, str) and is_dotted_path(content):
        yield content.partition(":")[0]
    elif isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from _modules(part)


def _digest(parts: Any) -> str:
    content = hashlib.sha256()
    for part in parts:
        content.update(hashlib.sha256(part).digest())
    return content.hexdigest()[:_DIGITS]
