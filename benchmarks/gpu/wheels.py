"""Gather wheels for a machine without a network: Python 3.12 on Linux, x86-64.

    python -m benchmarks.gpu.wheels --out build/wheels        the packages that are often missing
    python -m benchmarks.gpu.wheels --out build/wheels timm rich pyyaml    these beside them
    python -m benchmarks.gpu.wheels --out build/wheels --dali    DALI beside them, 231 MB
    python -m benchmarks.gpu.wheels --join /tmp/wheels        there, if wheels came in parts

Wheels come from the index that pip is configured with, without their dependencies, so that nothing
as large as torch is fetched: name each package that is missing. Versions are those that this
interpreter has installed, as far as it has them. Printed are the sizes, and the line that installs
the wheels on the other machine into a folder beside its own packages. Wheels that are too large to
carry at once are also written in parts of 50 MB, to be carried one by one and joined there.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Without these our trainer does not start; a machine with torch and timm has the others.
PACKAGES = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection")
#: DALI, what its import needs, and what decodes JPEG. Its other dependencies, libnvcomp among them,
#: are for formats that we do not read.
DALI = ("nvidia-dali-cuda130", "nvidia-nvimgcodec-cu13", "nvidia-nvjpeg")
DALI += ("astunparse", "gast", "six", "optree", "packaging")

_PLATFORMS = tuple(f"manylinux{tag}_x86_64" for tag in ("_2_28", "_2_27", "_2_17", "2014"))
_SITE = "/tmp/site"
_LIMIT_MIB = 64
#: Bytes of a part, which must stay below the limit.
_PART_BYTES = 50_000_000
_PART = re.compile(r"wheels-(?P<digest>[0-9a-f]{16})-(?P<number>\d+)-of-(?P<count>\d+)\.part")


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


def split(folder: Path, out: Path, size: int = _PART_BYTES) -> list[Path]:
    """Write the wheels of ``folder`` to ``out`` as parts of at most ``size`` bytes.

    The names of the parts have the number of parts and a checksum of the whole.
    """
    out.mkdir(parents=True, exist_ok=True)
    archive = out / "wheels.tar"
    with tarfile.open(archive, "w") as tar:
        for wheel in sorted(folder.glob("*.whl")):
            tar.add(wheel, wheel.name)
    digest, count = _digest(archive), -(-archive.stat().st_size // size)
    parts = []
    with archive.open("rb") as content:
        for number in range(1, count + 1):
            parts.append(out / f"wheels-{digest}-{number}-of-{count}.part")
            parts[-1].write_bytes(content.read(size))
    archive.unlink()
    return parts


def join(folder: Path) -> list[Path]:
    """Restore the wheels in ``folder`` from the parts that lie there, which are deleted.

    Raises:
        ValueError: parts are missing or damaged, or of several sets.
    """
    matches = [match for path in folder.iterdir() if (match := _PART.fullmatch(path.name))]
    sets = {(match["digest"], int(match["count"])) for match in matches}
    if len(sets) != 1:
        raise ValueError(f"{folder}: parts of {len(sets)} sets of wheels; valid: all parts of one")
    [(digest, count)] = sets
    by_number = {int(match["number"]): folder / match[0] for match in matches}
    missing = [str(number) for number in range(1, count + 1) if number not in by_number]
    if missing:
        raise ValueError(f"{folder}: no part {', '.join(missing)}; valid: all {count} parts")
    archive = folder / "wheels.tar"
    with archive.open("wb") as whole:
        for number in range(1, count + 1):
            whole.write(by_number[number].read_bytes())
    if _digest(archive) != digest:
        raise ValueError(f"{folder}: the checksum of the parts is wrong; valid: {digest}")
    with tarfile.open(archive) as tar:
        names = tar.getnames()
        tar.extractall(folder, filter="data")
    for path in (archive, *by_number.values()):
        path.unlink()
    return [folder / name for name in names]


def _digest(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.wheels",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="folder for the wheels")
    where.add_argument("--join", type=Path, metavar="DIR", help="folder that holds all parts")
    parser.add_argument("--dali", action="store_true", help="also " + ", ".join(DALI))
    parser.add_argument("more", nargs="*", help="packages beside " + ", ".join(PACKAGES))
    options = parser.parse_args(arguments)
    if options.join:
        try:
            print(f"{len(join(options.join))} wheels joined")
        except ValueError as error:
            parser.error(str(error))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [*PACKAGES, *(DALI if options.dali else ()), *options.more]
    code = subprocess.run(download_command(list(dict.fromkeys(chosen)), options.out)).returncode
    if code:
        return code
    sizes = {path.name: path.stat().st_size / 2**20 for path in sorted(options.out.glob("*.whl"))}
    for name, size in sizes.items():
        print(f"{size:7.2f} MiB  {name}")
    total = sum(sizes.values())
    print(f"{total:7.2f} MiB  in all")
    if total <= _LIMIT_MIB:
        print(f"\nOn the other machine:\n{install_line(options.out)}")
        return 0
    parts = split(options.out, options.out / "parts")
    there = Path("/tmp/wheels")
    print(f"\nToo much to carry at once. On the other machine, for each of {len(parts)} parts:")
    print(*(f"mkdir -p {there} && cp {part} {there}/" for part in parts), sep="\n")
    print(f"and then:\npython3 -m benchmarks.gpu.wheels --join {there} && {install_line(there)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
