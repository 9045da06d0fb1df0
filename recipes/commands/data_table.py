"""Print the findings of ``largebatch data check`` as a table."""

from __future__ import annotations

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from ...pipeline.audit import DataReport, Spread

_LINES = 10


def print_summary(found: DataReport, console: Console | None = None) -> None:
    """Print the findings, by default on standard output."""
    console = console or Console(highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for split in found.splits:
        table.add_column(split.name, justify="right")
    splits = found.splits
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
    for title, both, several in (
        ("in both train and val", True, None),
        ("in several classes", False, True),
        ("duplicates within a class", False, False),
    ):
        groups = [r for r in found.repeated if (len(r.splits) > 1) == both]
        groups = [r for r in groups if several in (None, len(r.classes) > 1)]
        _list(console, title, [" = ".join(group.names) for group in groups])
    _list(console, "wrong extension", [f"{f.name}: {f.what}" for f in found.misnamed])
    _list(console, "unusual", [f"{f.name}: {f.what}" for f in found.unusual])
    _list(console, "EXIF orientation set", found.turned)
    _list(console, "other files, ignored in training", found.others)
    console.print(f"{found.path}: {_verdict(found)}", markup=False)


def _verdict(found: DataReport) -> str:
    verdict = "no problem that stops training"
    if found.corrupt:
        verdict = f"{len(found.corrupt):,} problems that stop training"
    if found.damaged:
        verdict = (
            f"damaged images: {len(found.damaged):,}, refused by data.verify=strict; {verdict}"
        )
    if found.left_out:
        verdict = f"not in the data: {len(found.left_out):,} files or folders; {verdict}"
    return verdict


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
        console.print(f"  and {len(lines) - _LINES:,} more; --json FILE has them", markup=False)
