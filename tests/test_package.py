"""The contents of the wheel, and the packages that each subpackage needs."""

import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("builds the wheel and imports subpackages in new processes")

ROOT = Path(__file__).parents[1]
PACKAGES = ("lars", "amp", "comm", "pipeline", "recipes")


def built(folder):
    """The bytes of the wheel that is built from a copy of the repository in a folder."""
    copy = folder / "source"
    copy.mkdir(parents=True)
    for name in (*PACKAGES, "src", "pyproject.toml", "README.md", "LICENSE"):
        path = ROOT / name
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(path, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copyfile(path, copy / name)  # with the time of the copy
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    result = subprocess.run([*build, copy], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return next(folder.glob("*.whl")).read_bytes()


def test_the_wheel_holds_the_whole_tree_and_is_built_to_the_same_bytes(tmp_path):
    content = built(tmp_path / "one")
    assert built(tmp_path / "other") == content
    with zipfile.ZipFile(io.BytesIO(content)) as wheel:
        packed = {name for name in wheel.namelist() if not name.split("/")[0].endswith("dist-info")}
    wanted = {f"largebatch/{name}" for name in ("__init__.py", "_lazy.py", "py.typed")}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix in (".css", ".html", ".js", ".json", ".md", ".py", ".yaml"):
                wanted.add(f"largebatch/{path.relative_to(ROOT)}")
    assert packed == wanted


# Imports each core subpackage and its names alone, and checks what else that imports.
EACH_CORE_PACKAGE = f"""
import importlib, sys
sys.path.insert(0, {str(ROOT / "src")!r})
for package in ("lars", "amp", "comm"):
    room = importlib.import_module(f"largebatch.{{package}}")
    names = [getattr(room, name) for name in room.__all__]
    ours = [n for n in sys.modules if n.split(".")[0] == "largebatch"]
    others = [n for n in ours if n.count(".") and n.split(".")[1] not in (package, "_lazy")]
    assert not others, (package, others)
    assert sys.modules.get("triton") is None, package
    for name in ours:
        del sys.modules[name]
"""


def test_the_core_needs_torch_alone_and_imports_triton_only_when_needed():
    """Triton comes with torch, takes long to import and reads its environment on import."""
    code = """
import sys
for name in ("torchvision", "timm", "nvidia.dali", "PIL", "pydantic", "typer", "rich", "yaml",
             "matplotlib", "sklearn", "tensorboard", "scipy"):
    sys.modules[name] = None
"""
    result = subprocess.run(
        [sys.executable, "-c", code + EACH_CORE_PACKAGE], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_links_in_src_lead_to_the_subpackages():
    for package in PACKAGES:
        link = ROOT / "src" / "largebatch" / package
        assert link.is_symlink()
        assert link.resolve() == ROOT / package
