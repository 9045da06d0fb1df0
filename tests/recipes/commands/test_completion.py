"""Completion on TAB through the protocols of the shells, and what help and completion import."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from largebatch.recipes.schema.names import recipe_names

ROOT = Path(__file__).parents[3]
MODULE = "largebatch.recipes.commands.app"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    """The words that bash offers after some words, with the script that is installed for it."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "largebatch"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {MODULE} "$@"\n')
    command.chmod(0o755)
    (folder / "mine.yaml").write_text("extends: digits\n")
    (folder / "configs").mkdir()
    (folder / "configs" / "one.yaml").write_text("extends: digits\n")
    environment = {**ENVIRONMENT, "PATH": f"{folder}:{os.environ['PATH']}"}
    script = subprocess.run(
        ["largebatch"],
        env={**environment, "_LARGEBATCH_COMPLETE": "source_bash"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    def offered(*words):
        asked = (
            f'COMP_WORDS=("$@")\nCOMP_CWORD={len(words)}\n_largebatch_completion largebatch\n'
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        result = subprocess.run(
            ["bash", "--norc", "-c", script + asked, "bash", "largebatch", *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return result.stdout.split()

    return offered


def test_recipes_and_paths_of_recipes_complete(bash):
    resnets = [name for name in recipe_names() if name.startswith("resnet50-s")]
    assert bash("train", "resnet50-s") == resnets
    assert bash("recipes", "show", "digi") == ["digits"]
    assert bash("comm", "tune", "--recipe", "resnet50-j") == ["resnet50-jia-b65536"]
    assert bash("train", "mi") == ["mine.yaml"]
    assert bash("train", "con") == ["configs/", "configs/one.yaml"]
    assert bash("train", "") == [*recipe_names(), "mine.yaml"]


@pytest.mark.parametrize("command", ["train", "schedule", "comm simulate", "tune precision"])
def test_keys_complete_with_their_sign(bash, command):
    words = (*command.split(), "digits")
    assert bash(*words, "schedule.warm") == ["schedule.warmup=", "schedule.warmup_shape="]


def test_a_single_key_comes_with_values_so_that_no_space_is_added(bash):
    """bash adds a space after a word that is the only one."""
    assert bash("train", "digits", "channels") == [
        "channels_last=",
        *(f"channels_last={value}" for value in ("auto", "true", "false")),
    ]
    assert bash("train", "digits", "log_e") == ["log_every=", "log_every=10"]
    assert bash("train", "digits", "optimizer.lr") == ["optimizer.lr=", "optimizer.lr=VALUE"]


def test_values_complete_after_the_sign_at_which_bash_splits_words(bash):
    assert bash("train", "digits", "precision", "=", "b") == ["bf16", "bf16-master"]
    assert bash("train", "digits", "epochs=1", "device", "=") == ["auto", "cuda", "cpu"]
    assert bash("train", "digits", "comm.algorithm", "=", "n") == ["null"]
    assert bash("train", "digits", "optimizer.name", "=", "l") == ["lars", "lamb"]
    assert bash("train", "digits", "track", "=", "w") == ["wandb"]
    assert bash("train", "digits", "data.path", "=", "d") == []  # bash completes files then


def test_runs_and_weights_complete(bash):
    assert bash("evaluate", "RUN", "data.eval_r") == ["data.eval_resize=", "data.eval_resize=256"]
    assert bash("evaluate", "RUN", "--recipe", "digi") == ["digits"]
    assert bash("export", "RUN", "--to", "o") == ["onnx"]
    assert bash("runs", "--sort", "t") == ["top1", "time"]


def test_sections_complete(bash):
    assert bash("recipes", "keys", "o") == ["optimizer"]
    assert bash("recipes", "keys", "batch") == ["batch_size", "batch_norm"]


@pytest.mark.parametrize(
    ("shell", "words", "expected"),
    [
        ("zsh", "train digits precision=b", '"precision=bf16-master"'),
        ("zsh", "train digits schedule.w", '"schedule.warmup_shape=":"Shape of the warm-up."'),
        ("fish", "train digits precision=b", "precision=bf16-master"),
    ],
)
def test_other_shells_take_whole_words(shell, words, expected):
    result = subprocess.run(
        [sys.executable, "-m", MODULE],
        env={
            **ENVIRONMENT,
            "_LARGEBATCH_COMPLETE": f"complete_{shell}",
            "_TYPER_COMPLETE_ARGS": f"largebatch {words}",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert expected in result.stdout


NO_TORCH = """
import json, os, sys
from typer.testing import CliRunner
from largebatch.recipes.commands.tree import app

def groups(command, words=()):
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from groups(inner, (*words, name))

from typer.main import get_command
helped = list(groups(get_command(app)))
for words in helped:
    result = CliRunner().invoke(app, [*words, "--help"], prog_name="largebatch")
    assert result.exit_code == 0, (words, result.output)
keys = CliRunner().invoke(app, ["recipes", "keys", "--json"])
for words in ("train dig", "train digits precision=b", "recipes keys o"):
    os.environ.update(COMP_WORDS="largebatch " + words, COMP_CWORD=str(len(words.split())))
    os.environ["_LARGEBATCH_COMPLETE"] = "complete_bash"
    completed = CliRunner().invoke(app, [], prog_name="largebatch")
    assert completed.output.strip(), words
heavy = [m for m in ("torch", "numpy", "yaml", "timm", "PIL") if m in sys.modules]
print(json.dumps([len(helped), keys.exit_code, heavy]))
"""


def test_help_and_completion_do_not_import_torch():
    result = subprocess.run(
        [sys.executable, "-c", NO_TORCH],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    helped, exit_code, heavy = json.loads(result.stdout)
    assert helped > 20
    assert exit_code == 0
    assert heavy == []
