"""The rooms import their public names on first use."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from largebatch import amp, comm, lars

ROOMS = ("amp", "comm", "lars", "pipeline", "recipes")


@pytest.mark.parametrize("room", ROOMS)
def test_the_public_names_are_found_and_are_those_that_type_checkers_read(room):
    """A name that is also a module of the room would be that module once it is imported."""
    package = importlib.import_module(f"largebatch.{room}")
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert {*package.__all__} <= {*dir(package)}
    with pytest.raises(AttributeError, match=f"'largebatch.{room}' has no attribute 'Form'"):
        _ = package.Form
    file = Path(package.__file__)
    imported = [
        alias.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "") not in ("typing", "_lazy")
        for alias in node.names
    ]
    assert sorted(imported) == sorted(package.__all__)
    assert not {*imported} & {path.stem for path in file.parent.iterdir()}


def test_names_that_load_nothing_are_those_of_the_tables():
    assert tuple(comm.ALGORITHMS) == comm.ALGORITHM_NAMES
    assert tuple(lars.DIALECTS) == lars.DIALECT_NAMES
    assert tuple(amp.PRECISIONS) == amp.PRECISION_NAMES


def loaded_by(*arguments):
    """The modules that a command of the command line loads, which may fail."""
    return modules_after(f"""
import sys
sys.argv = ["largebatch", *{arguments!r}]
from largebatch.recipes.commands.app import main
try:
    main()
except SystemExit:
    pass
""")


def modules_after(code):
    """The modules that a new process has loaded after some code."""
    code += "\nimport sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1].split()


@pytest.mark.parametrize(
    "arguments",
    [
        ("recipes",),
        ("recipes", "keys"),
        ("runs", "docs"),
        ("train", "digits", "optimizer.lr=-1"),
        ("plan", "digits", "optimzer.lr=3"),
    ],
    ids=" ".join,
)
def test_mistakes_lists_and_help_are_there_before_torch_is_loaded(arguments):
    loaded = loaded_by(*arguments)
    assert not {"torch", "timm", "torchvision", "nvidia.dali"} & {*loaded}


@pytest.mark.slow("imports torch in a new process")
def test_reading_images_loads_none_of_the_tools_and_no_back_end():
    names = "ImageFolder, Loader, Shards, Synthetic, Transform, hold_out, index_shards"
    loaded = modules_after(f"from largebatch.pipeline import {names}")
    assert "largebatch.pipeline.loader" in loaded
    tools = tuple(f"largebatch.pipeline.{tool}" for tool in ("audit", "prepare", "stalls"))
    others = {"PIL", "torchvision", "nvidia.dali", "fsspec", "aiohttp", "sklearn", "scipy"}
    assert not [name for name in loaded if name.startswith(tools) or name in others]
