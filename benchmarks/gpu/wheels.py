"""Gather wheels for a machine without a network: Python 3.12 on Linux, x86-64.

    python -m benchmarks.gpu.wheels --out build/wheels        the packages that are often missing
    python -m benchmarks.gpu.wheels --out build/wheels timm rich pyyaml    these beside them
    python -m benchmarks.gpu.wheels --out build/wheels --dali    DALI beside them, 231 MB

Wheels come from the index that pip is configured with, without their dependencies, so that nothing
as large as torch is fetched: name each package that is missing. Versions are those that this
interpreter has installed, as far as it has them. Printed are the sizes, and the line that installs
the wheels on the other machine into a folder beside its own packages.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Without these our trainer does not start; a machine with torch and timm has the others.
PACKAGES = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "filelock")
#: DALI, what its import needs, and what decodes JPEG. Its other dependencies, libnvcomp among them,
#: are for formats that we do not read.
DALI = ("nvidia-dali-cuda130", "nvidia-nvimgcodec-cu13", "nvidia-nvjpeg")
DALI += ("astunparse", "gast", "six", "optree", "packaging")

_PLATFORMS = tuple(f"manylinux{tag}_x86_64" for tag in ("_2_28", "_2_27", "_2_17", "2014"))
_SITE = "/tmp/site"


def pinned(package: str) -> str:
    """Return ``package==version`` if it is installed here, else the name alone."""
    try:
        return f"{package}=={version(package)}"
    except PackageNotFoundError:
        return package


def download_command(packages: list[str], folder: Path) -> list[str]:
    """Return pip's command line."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp"]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    return [*command, "--dest", str(folder), *map(pinned, packages)]


def install_line(folder: Path) -> str:
    """Return the shell line that installs the wheels where there is no network."""
    return (
        "python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade "
        f"--target {_SITE} {folder}/*.whl && export PYTHONPATH={_SITE}:src:."
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.wheels",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the wheels")
    parser.add_argument("--dali", action="store_true", help="also " + ", ".join(DALI))
    parser.add_argument("more", nargs="*", help="packages beside " + ", ".join(PACKAGES))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [*PACKAGES, *(DALI if options.dali else ()), *options.more]
    code = subprocess.run(download_command(list(dict.fromkeys(chosen)), options.out)).returncode
    if code:
        return code
    sizes = {path.name: path.stat().st_size / 2**20 for path in sorted(options.out.glob("*.whl"))}
    for name, size in sizes.items():
        print(f"{size:7.2f} MiB  {name}")
    print(f"{sum(sizes.values()):7.2f} MiB  in all")
    print(f"\nOn the other machine:\n{install_line(options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
