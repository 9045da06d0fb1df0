"""Explain in one line what is wrong with a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from ...pipeline import without_secrets
from ..errors import did_you_mean, suggested
from .recipe import Recipe
from .types import SECTION_CHECK

#: Larger sections are not listed in messages.
_MOST_LISTED = 8

#: What other trainers call a key.
_SYNONYMS = {
    "amp": "precision",
    "arch": "model.name",
    "bs": "batch_size",
    "data_dir": "data.path",
    "global_batch_size": "batch_size",
    "learning_rate": "optimizer.lr",
    "max_epochs": "epochs",
    "num_epochs": "epochs",
    "num_workers": "data.threads",
    "opt": "optimizer.name",
    "output_dir": "run_dir",
    "warmup_epochs": "schedule.warmup",
    "wd": "optimizer.weight_decay",
    "workers": "data.threads",
}


def explain(error: ValidationError) -> str:
    """The first error in one line: ``key: problem; valid: ...``, without passwords in URLs."""
    return without_secrets(_explain(error))


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    where = [str(part) for part in first["loc"]]
    key = ".".join(where)
    if first["type"] == "extra_forbidden":
        section = _section(where[:-1])
        valid = [field.alias or name for name, field in section.model_fields.items()]
        hint = _hint(key, [".".join([*where[:-1], name]) for name in valid])
        listed = ", ".join(valid)
        if len(valid) > _MOST_LISTED:
            listed = " ".join(["those of `largebatch recipes keys", *where[:-1][:1]]) + "`"
        return f"unknown key {key!r}{f'{hint} Valid' if hint else '; valid'}: {listed}"
    if first["type"] == "missing":
        return f"{key}: missing; it has no default"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == SECTION_CHECK:
        return f"{'.'.join([*where, first['ctx']['key']])}: {message}"
    if first["type"] == "value_error":
        return f"{key}: {message}"
    given = "" if isinstance(first["input"], dict) else f", not {first['input']!r}"
    return f"{key}: {message[0].lower()}{message[1:]}{given}"


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Full names of a section's keys, as overrides give them: ``optimizer.lr``."""
    for name, field in section.model_fields.items():
        key, inner = prefix + (field.alias or name), field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys_of(inner, f"{key}.")
        else:
            yield key


def _hint(key: str, siblings: list[str]) -> str:
    """``"; did you mean 'optimizer.lr'?"`` for ``lr``, ``optimzer.lr`` or ``optimizer.lrr``."""
    known = list(keys_of(Recipe))
    last = key.rpartition(".")[2]
    if last in _SYNONYMS:
        return suggested([_SYNONYMS[last]])
    same = [name for name in known if name.rpartition(".")[2] == last]
    return suggested(same[:5]) or did_you_mean(key, siblings) or did_you_mean(key, known)


def _section(where: list[str]) -> type[BaseModel]:
    """The section at a place in a recipe."""
    section: Any = Recipe
    for part in where:
        if not part.isdigit():  # a position in a list of sections
            annotation: Any = section.model_fields[part].annotation
            section = next(iter(get_args(annotation)), annotation)
    return section  # type: ignore[no-any-return]
