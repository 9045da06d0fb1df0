"""Importing the input loads only what is used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
TOOLS = ("largebatch.pipeline.audit", "largebatch.pipeline.prepare", "largebatch.pipeline.stalls")
OTHERS = ("PIL", "torchvision", "nvidia.dali", "fsspec", "aiohttp", "sklearn", "scipy")
IMPORTS = (
    "import largebatch.pipeline",
    "from largebatch.pipeline import BACKENDS, IMAGENET_MEAN, IMAGENET_STD, INTERPOLATIONS, "
    "ON_ERROR, SHARD_FORMATS, DataError, Stage",  # what a recipe is checked with
    "from largebatch.pipeline import ImageFolder, Loader, Shards, Synthetic, Transform, hold_out, "
    "index_shards",
)


@pytest.mark.slow("imports torch in a new process")
def test_each_import_loads_only_what_it_uses():
    """The room no torch, the names for a recipe no torch, and training none of the tools."""
    lines = (f"{line}; print(json.dumps([*sys.modules]))" for line in IMPORTS)
    code = "\n".join([f"import json, sys; sys.path.insert(0, {str(SRC)!r})", *lines])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    room, recipe, training = map(json.loads, result.stdout.splitlines())
    assert not [name for name in room if name.startswith(("torch", "largebatch.pipeline."))]
    assert "torch" not in recipe
    assert "largebatch.pipeline.loader" in training
    assert not [name for name in training if name.startswith(TOOLS) or name in OTHERS]
