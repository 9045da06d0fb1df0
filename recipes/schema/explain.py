"""Explain in one line what is wrong with a recipe."""

from __future__ import annotations

from pydantic import ValidationError

from ...pipeline import without_secrets
from ..errors import did_you_mean, suggested
from .keys import EXTENDS, all_keys
from .types import SECTION_CHECK

#: Larger sections are not listed in messages.
_MOST_LISTED = 8

#: What other trainers call a key.
_SYNONYMS = {
    **{"amp": "precision", "arch": "model.name", "learning_rate": "optimizer.lr"},
    **{"max_epochs": "epochs", "num_workers": "data.threads", "opt": "optimizer.name"},
    **{"output_dir": "run_dir", "warmup_epochs": "schedule.warmup", "workers": "data.threads"},
    "wd": "optimizer.weight_decay",
}


def explain(error: ValidationError) -> str:
    """The first error in one line: ``key: problem; valid: ...``, without passwords in URLs."""
    return without_secrets(_explain(error))


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    where = [str(part) for part in first["loc"]]
    key = ".".join(where)
    if first["type"] == "extra_forbidden":
        return _unknown(*where)
    if first["type"] == "missing":
        return f"{key}: missing; it has no default"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == SECTION_CHECK:
        return f"{'.'.join([*where, first['ctx']['key']])}: {message}"
    if first["type"] == "value_error":
        return f"{key}: {message}"
    if first["type"] == "model_type":
        inner = next(each.name for each in all_keys() if each.section == where[0])
        message = f"Input should be its keys, such as {inner}"
    given = "" if isinstance(first["input"], dict) else f", not {first['input']!r}"
    message = message.replace("a valid tuple", "a list").replace("a valid dictionary", "keys")
    return f"{key}: {message[0].lower()}{message[1:]}{given}"


def _unknown(*where: str) -> str:
    """Name an unknown key, those that it may be meant for, and those of its section.

    With ``"; did you mean 'optimizer.lr'?"`` for ``lr``, ``optimzer.lr`` or ``optimizer.lrr``.
    """
    *parents, last = where
    key = ".".join(where)
    section = "".join(f"{part}." for part in parents if not part.isdigit())  # without positions
    known = [each.name for each in all_keys() if each.name != EXTENDS]
    inner = (name.replace("[]", "") for name in known)
    inner = (name.removeprefix(section) for name in inner if name.startswith(section))
    valid = list(dict.fromkeys(name.partition(".")[0] for name in inner))
    single = [name for name in known if "[]" not in name]
    same = [name for name in single if name.rpartition(".")[2] == last]
    siblings = [".".join([*parents, name]) for name in valid]
    meant = [_SYNONYMS[last]] if last in _SYNONYMS else same[:5]
    hint = suggested(meant) or did_you_mean(key, siblings) or did_you_mean(key, single)
    listed = ", ".join(valid)
    if len(valid) > _MOST_LISTED:
        listed = " ".join(["those of `largebatch recipes keys", *parents[:1]]) + "`"
    return f"unknown key {key!r}{f'{hint} Valid' if hint else '; valid'}: {listed}"
