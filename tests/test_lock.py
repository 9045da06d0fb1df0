"""``requirements.lock`` holds all that its extras need, each in one version and with hashes.

Installing from it takes a network, so what is checked is what pip would: that it parses, and that
pip, with ``--require-hashes``, would miss nothing.
"""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
EXTRAS = ("recipes", "cuda13", "remote")
ENTRY = re.compile(r"(\S+==\S+)((?: +--hash=sha256:[0-9a-f]{64})+)")


def pins(lines):
    """The version of each package of lines such as ``name==1.0``, by its canonical name."""
    found = [Requirement(line) for line in lines]
    versions = {canonicalize_name(one.name): str(one.specifier) for one in found}
    assert len(versions) == len(found)
    return {name: version.removeprefix("==") for name, version in versions.items()}


def read_lock(text):
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    entries = [line.strip() for line in "\n".join(lines).replace("\\\n", " ").splitlines()]
    matches = [ENTRY.fullmatch(entry) for entry in entries]
    unpinned = [entry for entry, match in zip(entries, matches, strict=True) if not match]
    assert not unpinned, f"{unpinned}; valid: name==version --hash=sha256:…"
    return pins(match[1] for match in matches)


def missing(lock, requirements):
    """What of the requirements, and of theirs, is not in a lock; and what they need of it."""
    left, seen, lacking = [*requirements], set(), []
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        if name not in lock or lock[name] not in wanted.specifier:
            lacking.append(f"{wanted} is {lock.get(name, 'not there')}")
            continue
        for extra in ("", *wanted.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            assert metadata.version(name) == lock[name], f"{name} is installed in another version"
            theirs = map(Requirement, metadata.requires(name) or ())
            left += [r for r in theirs if r.marker is None or r.marker.evaluate({"extra": extra})]
    return lacking, {name for name, _ in seen}


@pytest.fixture(scope="module")
def lock():
    return read_lock((ROOT / "requirements.lock").read_text())


def test_the_lock_has_what_its_extras_and_the_build_need_and_nothing_else(lock):
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = content["project"]
    wanted = [*content["build-system"]["requires"], *project["dependencies"]]
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    lacking, needed = missing(lock, map(Requirement, wanted))
    assert lacking == []
    assert lock.keys() - needed == set()


def test_the_versions_of_the_lock_are_those_that_were_tested_together(lock):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = pins(line for line in lines if line and not line.startswith("#"))
    assert {name: tested.get(name) for name in lock} == lock
