"""What is downloaded for a machine without a network; pip itself is not run."""

from importlib.metadata import version
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from benchmarks.gpu import wheels


@pytest.fixture
def pip(monkeypatch):
    """Record pip's command lines, and make files in its place."""
    commands = []

    def run(command):
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        for name in command[command.index("--dest") + 2 :]:
            (folder / f"{name.partition('=')[0]}-1-py3-none-any.whl").write_bytes(bytes(2**20))
        return CompletedProcess(command, 0)

    monkeypatch.setattr(wheels.subprocess, "run", run)
    return commands


def test_the_missing_packages_are_downloaded_for_the_other_machine(pip, tmp_path, capsys):
    assert wheels.main(["--out", str(tmp_path / "whl"), "--dali", "rich", "nosuchpackage"]) == 0
    [command] = pip
    folder = command.index("--dest")
    assert command[folder + 1] == str(tmp_path / "whl")
    assert command[folder + 2 :] == [
        *(f"{name}=={version(name)}" for name in (*wheels.PACKAGES, *wheels.DALI, "rich")),
        "nosuchpackage",
    ]
    assert command[command.index("--python-version") + 1] == "3.12"
    assert {"--no-deps", "--only-binary=:all:", "manylinux_2_17_x86_64"} <= {*command}
    assert not any("://" in argument for argument in command)
    output = capsys.readouterr().out
    assert "   1.00 MiB  pydantic-1-py3-none-any.whl" in output
    assert f"{len(command) - folder - 2:7.2f} MiB  in all" in output
    assert f"--target /tmp/site {tmp_path / 'whl'}/*.whl && export PYTHONPATH=" in output
