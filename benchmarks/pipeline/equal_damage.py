"""Flips, insertions, zeros and cuts in equal parts, anywhere in each photograph of a sample."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from benchmarks import tables
from benchmarks.pipeline.mutations import EQUAL
from largebatch.pipeline.decode.verify import verify

#: A pixel is wrong if a channel differs by more than this many of 255 levels.
LEVELS = 8
#: A picture is wrong if more than this share of its pixels are.
VISIBLE = 0.01


def wrong_share(original: bytes, damaged: bytes) -> float:
    """Return the share of wrong pixels in the picture of a damaged image; 1 if there is none."""
    wanted, found = _picture(original), _picture(damaged)
    if found is None or found.shape != wanted.shape:
        return 1.0
    difference = np.abs(found.astype(np.int16) - wanted.astype(np.int16)).max(-1)
    return float((difference > LEVELS).mean())


def _picture(content: bytes) -> NDArray[np.uint8] | None:
    """Return what a decoder makes of a file that goes on after errors; None if it cannot."""
    from simplejpeg import decode_jpeg

    ImageFile.LOAD_TRUNCATED_IMAGES = True
    try:
        if content[:2] == b"\xff\xd8":
            return decode_jpeg(content, strict=False)
        with Image.open(io.BytesIO(content)) as image:
            return np.asarray(image.convert("RGB"))
    except Exception:  # Pillow's decoders raise many kinds of exceptions
        return None
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = False


def equal_parts(photographs: list[bytes], seed: int) -> list[dict[str, Any]]:
    """Return counts for each kind of :data:`EQUAL`, each done once to each photograph."""
    rows = []
    for number, (kind, mutation) in enumerate(EQUAL.items()):
        row = dict.fromkeys(("mutants", "found", "wrong", "wrong_found"), 0)
        for i, original in enumerate(photographs):
            damaged = mutation(original, np.random.default_rng([seed, number, i]))
            found = damage_of(damaged)
            wrong = wrong_share(original, damaged) > VISIBLE
            row["mutants"] += 1
            row["found"] += found
            row["wrong"] += wrong
            row["wrong_found"] += wrong and found
        rows.append({"kind": kind} | row)
    return rows


def damage_of(content: bytes) -> bool:
    """Whether ``strict`` finds damage in an image."""
    try:
        verify(np.frombuffer(content, np.uint8))
    except ValueError:
        return True
    return False


def equal_parts_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table of :func:`equal_parts`."""
    columns = {
        "mutants": "images",
        "found": "`strict` stops",
        "wrong": "wrong picture",
        "wrong_found": "of these `strict` stops",
    }
    if "valid" in rows[0]:  # counted with a decoder of its own, at commit fbc1dde
        columns["valid"] = "wrong, in a valid file"
    total = {"kind": "**all**"} | {key: sum(row[key] for row in rows) for key in columns}
    heads = {"damage anywhere in a photograph": "l", **dict.fromkeys(columns.values(), "r")}
    cells = [(row["kind"], *(row[key] for key in columns)) for row in [*rows, total]]
    text = f"Of the wrong pictures, {total['wrong_found'] / total['wrong']:.1%} are found"
    if "valid" in columns:
        text += f"; {1 - total['valid'] / total['wrong']:.1%} could be"
    return [tables.table(heads, cells), "", f"{text}."]
