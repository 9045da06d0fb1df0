"""What is downloaded for a machine without a network; pip itself is not run."""

from importlib.metadata import version
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    assert wheels.main(["--out", str(tmp_path / "whl"), "rich", "nosuchpackage"]) == 0
    [command] = pip
    folder = command.index("--dest")
    assert command[folder + 1] == str(tmp_path / "whl")
    assert command[folder + 2 :] == [
        *(f"{name}=={version(name)}" for name in (*wheels.PACKAGES, "rich")),
        "nosuchpackage",
    ]
    assert command[command.index("--python-version") + 1] == "3.12"
    assert {"--no-deps", "--only-binary=:all:", "manylinux_2_17_x86_64"} <= {*command}
    assert not any("://" in argument for argument in command)
    output = capsys.readouterr().out
    assert "   1.00 MiB  pydantic-1-py3-none-any.whl" in output
    assert "   6.00 MiB  in all" in output
    assert f"--target /tmp/site {tmp_path / 'whl'}/*.whl && export PYTHONPATH=" in output


def test_wheels_that_are_too_large_are_split_and_joined(pip, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(wheels, "_LIMIT_MIB", 5)
    monkeypatch.setattr(wheels.split, "__defaults__", (3 * 2**20,))
    assert wheels.main(["--out", str(tmp_path), "--dali"]) == 0
    assert {name.partition("=")[0] for name in pip[0][pip[0].index("--dest") + 2 :]} == {
        *wheels.PACKAGES,
        *wheels.DALI,
    }
    output = capsys.readouterr().out
    parts = sorted((tmp_path / "parts").iterdir())
    assert len(parts) == 5
    assert all(f"cp {part} /tmp/wheels/\n" in output for part in parts)
    assert "python3 -m benchmarks.gpu.wheels --join /tmp/wheels && python3 -m pip in" in output
    assert wheels.main(["--join", str(tmp_path / "parts")]) == 0
    made = {path.name: path.read_bytes() for path in tmp_path.glob("*.whl")}
    assert len(made) == len(wheels.PACKAGES + wheels.DALI)
    assert {path.name: path.read_bytes() for path in (tmp_path / "parts").iterdir()} == made


@settings(max_examples=25)
@given(st.lists(st.binary(max_size=5000), max_size=4), st.integers(700, 20_000), st.data())
def test_parts_give_the_wheels_back_or_an_error(contents, size, data):
    with TemporaryDirectory() as name:
        folder, out = Path(name, "wheels"), Path(name, "parts")
        folder.mkdir()
        for number, content in enumerate(contents):
            (folder / f"{number}.whl").write_bytes(content)
        parts = wheels.split(folder, out, size)
        assert max(part.stat().st_size for part in parts) <= size
        number = data.draw(st.integers(1, len(parts)))
        part = parts[number - 1]
        whole = part.read_bytes()
        part.unlink()
        with pytest.raises(ValueError, match=rf"no part {number}; valid|parts of 0 sets"):
            wheels.join(out)
        place = data.draw(st.integers(0, len(whole) - 1))
        part.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="the checksum of the parts is wrong"):
            wheels.join(out)
        part.write_bytes(whole)
        assert [path.read_bytes() for path in wheels.join(out)] == contents
        assert len([*out.iterdir()]) == len(contents)
