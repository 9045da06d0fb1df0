"""Errors of users: which they are, and how they are reported."""

import importlib

import pytest

from largebatch import recipes
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


def test_public_names_load_when_they_are_used():
    for name in recipes.__all__:
        assert getattr(recipes, name).__name__ == name
    assert set(recipes.__all__) <= set(dir(recipes))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = recipes.nothing
