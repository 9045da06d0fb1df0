"""Importing the input loads only what is used."""

import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
TOOLS = ("largebatch.pipeline.audit", "largebatch.pipeline.prepare", "largebatch.pipeline.stalls")


def modules_after(code):
    """Return the names of all modules loaded after running code in a fresh process."""
    code = f"import sys; sys.path.insert(0, {str(SRC)!r}); {code}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_importing_the_room_loads_no_torch_and_no_tools():
    loaded = modules_after("import largebatch.pipeline")
    assert not [name for name in loaded if name.startswith(("torch", "largebatch.pipeline."))]
    names = "BACKENDS, IMAGENET_MEAN, IMAGENET_STD, INTERPOLATIONS, ON_ERROR, SHARD_FORMATS"
    names += ", DataError, Stage"  # what a recipe is checked with
    assert "torch" not in modules_after(f"from largebatch.pipeline import {names}")


@pytest.mark.slow("imports in a new process")
def test_training_loads_neither_the_audit_nor_the_tools_that_prepare_data():
    names = "ImageFolder, Loader, Shards, Stage, Synthetic, Transform, hold_out, index_shards"
    loaded = modules_after(f"from largebatch.pipeline import {names}")
    assert "largebatch.pipeline.loader" in loaded
    assert not [name for name in loaded if name.startswith(TOOLS)]
    for package in ("PIL", "torchvision", "nvidia.dali", "fsspec", "aiohttp", "sklearn", "scipy"):
        assert package not in loaded
