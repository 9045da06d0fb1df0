"""Importing the input loads only what is used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
TOOLS = ("largebatch.pipeline.audit", "largebatch.pipeline.prepare", "largebatch.pipeline.stalls")
OTHERS = ("PIL", "torchvision", "nvidia.dali", "fsspec", "aiohttp", "sklearn", "scipy")
CODE = f"""
import json, sys
sys.path.insert(0, {str(SRC)!r})
from largebatch.pipeline import (
    ImageFolder, Loader, Shards, Synthetic, Transform, hold_out, index_shards
)
print(json.dumps([*sys.modules]))
"""


@pytest.mark.slow("imports torch in a new process")
def test_training_loads_none_of_the_tools_and_no_back_end():
    """What loads no torch is in tests/test_lazy_names.py."""
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    loaded = json.loads(result.stdout)
    assert "largebatch.pipeline.loader" in loaded
    assert not [name for name in loaded if name.startswith(TOOLS) or name in OTHERS]
