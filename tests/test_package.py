"""The package: what is in the wheel, and what each room needs."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("builds the wheel and imports rooms in new processes")

ROOT = Path(__file__).parents[1]
ROOMS = ("lars", "amp", "comm", "pipeline", "recipes")


def test_the_wheel_holds_the_whole_tree(tmp_path):
    copy = tmp_path / "source"
    copy.mkdir()
    for name in (*ROOMS, "src", "pyproject.toml", "README.md", "LICENSE"):
        path = ROOT / name
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(path, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(path, copy / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    result = subprocess.run([*build, copy], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        packed = {name for name in wheel.namelist() if not name.split("/")[0].endswith("dist-info")}
    wanted = {"largebatch/__init__.py", "largebatch/py.typed"}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*"):
            if path.suffix in (".json", ".py", ".yaml"):
                wanted.add(f"largebatch/{path.relative_to(ROOT)}")
    assert packed == wanted


# Imports each room of the core in turn, as if it were the first, and looks at what came with it.
EACH_ROOM = f"""
import importlib, sys
sys.path.insert(0, {str(ROOT / "src")!r})
for room in ("lars", "amp", "comm"):
    importlib.import_module(f"largebatch.{{room}}")
    ours = [n for n in sys.modules if n.split(".")[0] == "largebatch"]
    others = [n for n in ours if n.count(".") and n.split(".")[1] != room]
    assert not others, (room, others)
    assert sys.modules.get("triton") is None, room
    for name in ours:
        del sys.modules[name]
"""


def test_the_core_needs_torch_alone():
    """Imported where nothing but torch and what comes with it can be."""
    code = """
import sys
for name in ("torchvision", "timm", "nvidia.dali", "PIL", "pydantic", "typer", "rich", "yaml",
             "matplotlib", "sklearn", "tensorboard", "scipy", "triton"):
    sys.modules[name] = None
"""
    result = subprocess.run(
        [sys.executable, "-c", code + EACH_ROOM], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_triton_is_imported_when_it_is_needed_only():
    """It takes long, and reads its environment when it is imported."""
    result = subprocess.run([sys.executable, "-c", EACH_ROOM], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_pipeline_imports_without_dali_torchvision_or_pillow():
    code = f"""
import sys
for name in ("torchvision", "timm", "nvidia", "PIL", "pydantic", "sklearn", "scipy", "typer",
             "google_crc32c", "rich", "aiohttp", "s3fs"):
    sys.modules[name] = None
sys.path.insert(0, {str(ROOT / "src")!r})
import largebatch.pipeline
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_links_lead_to_the_rooms():
    for room in ROOMS:
        link = ROOT / "src" / "largebatch" / room
        assert link.is_symlink()
        assert link.resolve() == ROOT / room
