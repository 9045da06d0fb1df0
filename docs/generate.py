"""Generate the tables of the pages from the code: recipes, the command line, forms of LARS.

An extension of Sphinx: the fragments are written to ``docs/_generated``, which git ignores, before
Sphinx reads the pages that include them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from largebatch.lars import conventions
from largebatch.recipes.commands.tree import app
from largebatch.recipes.schema.catalogue import entries
from largebatch.recipes.schema.keys import LENGTHS, all_keys, sections
from largebatch.recipes.schema.names import recipe_names
from largebatch.recipes.schema.optimizers import OPTIMIZERS
from largebatch.recipes.schema.recipe import Recipe

#: A paragraph of a command's help that keeps its line breaks begins with this line.
_AS_IT_IS = "\b"


def write(folder: Path) -> None:
    """Write every fragment into ``folder``, leaving those that did not change untouched."""
    folder.mkdir(exist_ok=True)
    fragments = {
        "recipes.md": recipes(),
        "recipe-files.md": recipe_files(),
        "recipe-keys.md": recipe_keys(),
        "optimizers.md": optimizer_table(),
        "command-line.md": command_line(),
        "lars-conventions.md": lars_conventions(),
    }
    for name, text in fragments.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def lars_conventions() -> str:
    """The forms of LARS: a table, and below it their sources and notes."""
    lines = [
        "| `LARS.like` | library | dialect | denominator | coefficient | eps | momentum | adapt |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]
    for name, row in conventions.CONVENTIONS.items():
        cells = [
            f"`{name}`",
            row.library,
            f"`{row.dialect}`",
            _DENOMINATORS["" if row.dialect == "simclr-popular" else row.denominator],
            *(_number(x) for x in (row.trust_coefficient, row.eps, row.momentum)),
            conventions.ADAPTING[row.adapting],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Tensors that are exempt by their dimensions do not decay either. Sources:", ""]
    for name, row in conventions.CONVENTIONS.items():
        at_zero = "" if row.decay_at_zero_norm else "No decay where a norm is zero. "
        lines.append(f"- `{name}`: {row.source}. {at_zero}{row.note}".rstrip())
    return "\n".join(lines) + "\n"


_DENOMINATORS = {"sum-of-norms": "‖g‖ + λ‖w‖", "norm-of-sum": "‖g + λw‖", "": "‖momentum‖"}


def _number(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-")


def recipes() -> str:
    """The table of recipes, each name a link to the file further down on the page."""
    lines = [
        "| recipe | what it is | batch | micro-batch | optimizer | learning rate | momentum "
        "| weight decay | warm-up | decay | epochs | precision | to be reached |",
        "|---|---|---:|---:|---|---:|---:|---:|---:|---|---:|---|---|",
    ]
    for entry in entries():
        recipe, options = entry.recipe, entry.recipe.optimizer
        micro = f"{recipe.micro_batch_size:,}" if recipe.micro_batch_size else "all"
        cells = (
            f"[{entry.name}](#{entry.name})",
            entry.what,
            f"{recipe.batch_size:,}",
            micro,
            options.name + " nesterov" * options.nesterov,
            f"{options.lr:g}",
            f"{options.momentum:g}",
            f"{options.weight_decay:g}",
            str(recipe.schedule.warmup),
            _decay(recipe),
            f"{recipe.epochs:g}",
            recipe.precision,
            entry.reaches,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _decay(recipe: Recipe) -> str:
    """Shape of the learning-rate decay after warm-up."""
    schedule = recipe.schedule
    if schedule.name == "polynomial":
        return f"power {schedule.power:g}"
    if schedule.name == "step":
        return f"× 0.1 at {', '.join(map(str, schedule.milestones))}"
    return schedule.name


def optimizer_table() -> str:
    """The optimizers that recipes can name."""
    lines = ["| name | what it is | keys of its own |", "|---|---|---|"]
    for entry in OPTIMIZERS.values():
        keys = ", ".join(f"`{key}`" for key in entry.own_keys) or "none"
        lines.append(f"| `{entry.name}` | {entry.what} | {keys} |")
    return "\n".join(lines)


def recipe_files() -> str:
    """Every recipe's YAML file, under a heading that carries its name."""
    parts = []
    for name in recipe_names():
        parts.append(
            f"({name})=\n### {name}\n\n"
            f"```{{literalinclude}} ../../recipes/configs/{name}.yaml\n:language: yaml\n```\n"
        )
    return "\n".join(parts)


def recipe_keys() -> str:
    """The keys of each section of the schema; names in angle brackets are no HTML."""
    parts = [LENGTHS, f"## Top level\n\n{_keys_of('')}"]
    for name, meaning in sections().items():
        parts.append(f"## `{name}`\n\n{meaning}\n\n{_keys_of(name)}")
    return re.sub(r"<(?=[a-z])", r"\\<", "\n\n".join(parts) + "\n")


def _keys_of(section: str) -> str:
    lines = []
    for key in all_keys():
        if key.section == section:
            default = "required" if key.default is None else f"by default `{key.default}`"
            line = f"- `{key.name}` ({key.type}; {default}): {key.meaning}"
            lines.append(line.replace("*", r"\*"))
    return "\n".join(lines)


def command_line() -> str:
    """Every command with its arguments and options."""
    return "\n".join(_pages(typer.main.get_command(app), "largebatch"))


def _pages(command: Any, path: str) -> Iterator[str]:
    children = {
        name: child
        for name, child in getattr(command, "commands", {}).items()
        if not getattr(child, "hidden", False)
    }
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    words = [path, *("[OPTIONS]" for _ in options[:1]), *(_argument(p) for p in arguments)]
    if children:
        words.append("COMMAND")
    level = min(2 + path.count(" "), 4)
    usage, prose = " ".join(words), _prose(command.help or "")
    yield f"{'#' * level} {path}\n\n```text\n{usage}\n```\n\n{prose}\n"
    rows = [(f"`{_argument(p)}`", "", p.help or "") for p in arguments]
    rows += [(_option(p), _default(p), p.help or "") for p in options]
    if rows:
        yield "| argument or option | default | meaning |\n|---|---|---|"
        for row in rows:
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        yield ""
    for name, child in children.items():
        yield from _pages(child, f"{path} {name}")


def _prose(text: str) -> str:
    """Help text as Markdown: paragraphs marked to keep their lines become code blocks."""
    parts = []
    for paragraph in text.split("\n\n"):
        marked, _, rest = paragraph.partition("\n")
        if marked.strip(" ") == _AS_IT_IS:
            parts.append(f"```text\n{rest}\n```")
        else:
            parts.append(re.sub(r"`[^`]*`|[*_<>]", _escaped, paragraph.replace(_AS_IT_IS, "")))
    return "\n\n".join(parts)


def _escaped(found: re.Match[str]) -> str:
    """A character with a meaning in Markdown, escaped; code as it is."""
    return found[0] if found[0].startswith("`") else f"\\{found[0]}"


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    many = "..." if parameter.nargs == -1 and not name.endswith("...") else ""
    return f"{name}{many}" if parameter.required else f"[{name}]{many}"


def _option(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
    return ", ".join(f"`{name}{value}`" for name in names)


def _default(parameter: Any) -> str:
    default = parameter.default
    if default is None or default is False or callable(default) or default == []:
        return ""
    return f"`{getattr(default, 'value', default)}`".replace("`True`", "yes")


def setup(app: Any) -> dict[str, bool]:
    """Register as an extension of Sphinx."""
    write(Path(app.srcdir) / "_generated")
    return {"parallel_read_safe": True}
