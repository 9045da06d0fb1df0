"""The package: what is in the wheel, who imports whom, and what each room needs."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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


def imported_rooms(path):
    """The rooms that a file of a room imports, and names under which it reaches itself."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ("largebatch", *package)[: len(package) + 2 - node.level]
            full = [*base, *(node.module or "").split(".")]
            names = [alias.name for alias in node.names] if full[-1] == "" else []
            yield from ([full[1]] if len(full) > 1 and full[1] else names)
        else:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(n.split(".")[0] in ("largebatch", *ROOMS) for n in names), path


@pytest.mark.parametrize("room", ROOMS[:4])
def test_ground_floor_rooms_do_not_know_each_other(room):
    for path in (ROOT / room).rglob("*.py"):
        assert set(imported_rooms(path)) <= {room, "__version__"}, path


def test_the_upper_floor_imports_rooms_relatively():
    seen = {name for path in (ROOT / "recipes").rglob("*.py") for name in imported_rooms(path)}
    assert {"lars", "amp", "comm", "pipeline"} <= seen


@pytest.mark.parametrize("room", ["lars", "amp", "comm"])
def test_the_core_needs_torch_alone(room):
    """Imported where nothing but torch and what comes with it can be."""
    code = f"""
import sys
for name in ("torchvision", "timm", "nvidia.dali", "PIL", "pydantic", "typer", "rich", "yaml",
             "matplotlib", "sklearn", "tensorboard", "scipy", "triton"):
    sys.modules[name] = None
sys.path.insert(0, {str(ROOT / "src")!r})
import largebatch.{room}
others = [n for n in sys.modules if n.startswith("largebatch.") and n.split(".")[1] != {room!r}]
assert not others, others
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("room", ["lars", "amp", "comm"])
def test_triton_is_imported_when_it_is_needed_only(room):
    """It takes long, and reads its environment when it is imported."""
    path = f"sys.path.insert(0, {str(ROOT / 'src')!r})"
    code = f"import sys; {path}; import largebatch.{room}; assert 'triton' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
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
