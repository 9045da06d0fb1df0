"""The command ``largebatch data check``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import RecipeError

if TYPE_CHECKING:
    from rich.console import Console

    from ...pipeline.audit import DataReport, Spread

#: Most findings of a kind that are listed.
_LINES = 10


def data_check(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A data set, or one of its folders train and val: class folders or shards.",
        ),
    ],
    json_: Annotated[
        bool, typer.Option("--json", help="Print JSON in place of tables, with all findings.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(help="Number of threads that decode; default: one per core.")
    ] = None,
) -> None:
    """Read and decode every image of a data set, and report problems.

    Reports the number of images and classes, image sizes, formats and colour modes. Lists images
    that cannot be decoded, damaged ones (by libjpeg's warnings and PNG's checksums) that some
    decoders use in part, duplicates (in two classes, or in train and val), files whose extension
    belongs to another format, and shards that do not match their index.

    The exit code is 0 if training with data.verify=strict would use every image, 1 if it would stop
    or leave images out, and 2 if there is no data set at PATH.
    """
    import json

    from ...pipeline import check_data
    from .data_progress import Bar

    if workers is not None and workers < 1:
        raise RecipeError(f"--workers: {workers} is too small; valid: at least 1")
    with Bar() as bar:
        found = check_data(path, workers=workers, report=bar)
    if json_:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print_summary(found)
    raise typer.Exit(0 if found.usable else 1)


def print_summary(found: DataReport, console: Console | None = None) -> None:
    """Print the findings, by default on standard output."""
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    console = console or Console(highlight=False, soft_wrap=True)
    splits = found.splits
    table = Table("", box=None, pad_edge=False)
    for split in splits:
        table.add_column(split.name, justify="right")
    table.add_row("stored as", *(_stored(s.format, s.shards) for s in splits))
    table.add_row("images", *(f"{s.images:,}" for s in splits))
    table.add_row("classes", *(f"{s.classes:,}" for s in splits))
    table.add_row("images per class *", *(_spread(s.per_class) for s in splits))
    table.add_row("width in pixels *", *(_spread(s.width) for s in splits))
    table.add_row("height in pixels *", *(_spread(s.height) for s in splits))
    table.add_row("bytes per image *", *(_spread(s.image_bytes) for s in splits))
    table.add_row("bytes", *(decimal(s.bytes) for s in splits))
    for kind in dict.fromkeys(kind for s in splits for kind in s.kinds):
        table.add_row(kind, *(f"{s.kinds.get(kind, 0):,}" for s in splits))
    if any(s.damaged for s in splits):
        table.add_row("damaged", *(f"{s.damaged:,}" for s in splits))
    if any(s.turned for s in splits):
        table.add_row("EXIF orientation set", *(f"{s.turned:,}" for s in splits))
    console.print(table)
    console.print("* minimum, median, maximum")
    _list(console, "stops training", [f"{f.name}: {f.what}" for f in found.corrupt])
    _list(console, "not in the data", [f"{f.name}: {f.what}" for f in found.left_out])
    _list(console, "damaged", [f"{f.name}: {f.what}" for f in found.damaged])
    across = [r for r in found.repeated if len(r.splits) > 1]
    within = [r for r in found.repeated if len(r.splits) == 1]
    for title, groups in (
        ("in both train and val", across),
        ("in several classes", [r for r in within if len(r.classes) > 1]),
        ("duplicates within a class", [r for r in within if len(r.classes) == 1]),
    ):
        _list(console, title, [" = ".join(group.names) for group in groups])
    _list(console, "wrong extension", [f"{f.name}: {f.what}" for f in found.misnamed])
    _list(console, "unusual", [f"{f.name}: {f.what}" for f in found.unusual])
    _list(console, "EXIF orientation set", found.turned)
    _list(console, "other files, ignored in training", found.others)
    console.print(f"{found.path}: {_verdict(found)}", markup=False)


def _verdict(found: DataReport) -> str:
    parts = ["no problem that stops training"]
    if found.corrupt:
        parts = [f"{len(found.corrupt):,} problems that stop training"]
    if found.damaged:
        parts.insert(0, f"damaged images: {len(found.damaged):,}, refused by data.verify=strict")
    if found.left_out:
        parts.insert(0, f"not in the data: {len(found.left_out):,} files or folders")
    return "; ".join(parts)


def _stored(form: str, shards: int) -> str:
    return f"{form}, {shards:,} shards" if shards else form


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{spread.least:,.0f}, {spread.median:,.0f}, {spread.most:,.0f}"


def _list(console: Console, title: str, lines: list[str]) -> None:
    if not lines:
        return
    console.print(f"\n{title} ({len(lines):,}):", markup=False)
    for line in lines[:_LINES]:
        console.print(f"  {line}", markup=False)
    if len(lines) > _LINES:
        console.print(f"  and {len(lines) - _LINES:,} more; --json has them", markup=False)
