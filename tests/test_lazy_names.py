"""The rooms import their public names on first use."""

import ast
import importlib
from pathlib import Path

import pytest

ROOMS = ("comm", "pipeline")


@pytest.mark.parametrize("room", ROOMS)
def test_the_public_names_are_found_and_others_are_unknown(room):
    package = importlib.import_module(f"largebatch.{room}")
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert {*package.__all__} <= {*dir(package)}
    with pytest.raises(AttributeError, match=f"'largebatch.{room}' has no attribute 'Form'"):
        _ = package.Form


@pytest.mark.parametrize("room", ROOMS)
def test_what_type_checkers_read_is_what_is_public(room):
    """A name that is also a module of the room would be that module once it is imported."""
    file = Path(importlib.import_module(f"largebatch.{room}").__file__)
    imported = [
        alias.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "") not in ("typing", "_lazy")
        for alias in node.names
    ]
    assert sorted(imported) == sorted(importlib.import_module(f"largebatch.{room}").__all__)
    assert not {*imported} & {path.stem for path in file.parent.iterdir()}
