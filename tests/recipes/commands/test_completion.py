"""What help and completion on TAB show, and what they do not import."""

import json
import os
import subprocess
import sys
from pathlib import Path

from largebatch.recipes.commands.options import complete_recipe
from largebatch.recipes.schema.names import recipe_names

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "80"}


def test_recipes_and_files_complete(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("extends: digits")
    assert complete_recipe("") == [*recipe_names(), "mine.yaml"]
    assert complete_recipe("mi") == ["mine.yaml"]


NO_TORCH = """
import json, os, sys
from typer.testing import CliRunner
from largebatch.recipes.commands.tree import app

def groups(command, words=()):
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from groups(inner, (*words, name))

from typer.main import get_command
helped = {}
for words in groups(get_command(app)):
    result = CliRunner().invoke(app, [*words, "--help"], prog_name="largebatch")
    assert result.exit_code == 0, (words, result.output)
    helped[" ".join(words)] = result.output
for words in ("train dig", "recipes sh", "export RUN --t"):
    os.environ.update(COMP_WORDS="largebatch " + words, COMP_CWORD=str(len(words.split())))
    os.environ["_LARGEBATCH_COMPLETE"] = "complete_bash"
    completed = CliRunner().invoke(app, [], prog_name="largebatch")
    assert completed.output.strip(), words
heavy = [m for m in ("torch", "numpy", "yaml", "timm", "PIL") if m in sys.modules]
print(json.dumps([helped, heavy]))
"""


def test_every_command_has_help_and_neither_it_nor_completion_imports_torch():
    result = subprocess.run(
        [sys.executable, "-c", NO_TORCH],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    helped, heavy = json.loads(result.stdout)
    assert len(helped) > 20
    assert heavy == []
    for words, text in helped.items():
        lines = text.splitlines()
        assert lines[0].startswith("Usage: largebatch"), words
        assert lines[2].strip().endswith((".", "[OPTIONS]")), (words, lines[2])
        assert max(map(len, lines)) <= 80, words
