"""Errors of users: which they are, and how they are reported."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from largebatch.recipes import errors


def test_the_errors_of_all_rooms_are_the_users():
    for module, name in errors._ROOM_ERRORS:
        error = getattr(importlib.import_module(f"largebatch.{module}"), name)
        assert error in errors.user_errors()
        assert issubclass(error, Exception)


@pytest.mark.parametrize(("raised", "code"), [(errors.RecipeError, 2), (errors.TrainingError, 1)])
def test_an_error_is_one_line_and_an_exit_code(raised, code, capsys):
    for reports in (True, False):
        with (
            pytest.raises(SystemExit) as exit_,
            errors.exit_on_user_error(lambda error, reports=reports: reports),
        ):
            raise raised("two\n  lines")
        assert exit_.value.code == code
        assert capsys.readouterr().err == "largebatch: error: two lines\n" * reports


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError), errors.exit_on_user_error():
        raise ZeroDivisionError


MISSING = """
import runpy, sys
package, module, *words = sys.argv[1:]
sys.modules[package] = None
sys.argv = [module, *words]
runpy.run_module(f"largebatch.recipes.{module}", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("pydantic", ["__main__", "recipes", "show", "digits"]),
        ("typer", ["__main__", "--help"]),
        ("pydantic", ["train", "digits"]),
    ],
)
def test_a_missing_package_is_one_line_and_exit_code_2(package, words):
    command = [sys.executable, "-c", MISSING, package, *words]
    found = subprocess.run(command, capture_output=True, text=True)
    advice = f"{package} is not installed; valid: pip install 'largebatch[recipes]'"
    assert (found.returncode, found.stderr) == (2, f"largebatch: error: {advice}\n")


def test_the_packages_of_recipes_are_those_that_it_installs():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    names = [re.split("[>=]", line)[0] for line in project["optional-dependencies"]["recipes"]]
    imported = {"pillow": "PIL", "pyyaml": "yaml", "scikit-learn": "sklearn"}
    assert {imported.get(n, n.replace("-", "_")) for n in names} == {*errors._PACKAGES}
