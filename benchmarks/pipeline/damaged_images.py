"""Claim: ``data.verify=strict`` and ``largebatch data check`` find nearly all damaged images that
decoders use without a word, and name no unharmed one; the two back ends refuse the same images.

    python -m benchmarks.pipeline.damaged_images --sample imagenet-sample.tar --unharmed cifar.tar

Photographs of the sample are damaged in each of several kinds, with fixed seeds. Each damaged image
goes through ``check_data`` and, alone, through an evaluation with each back end, with
``verify="decode"`` and with ``"strict"``. How much of its picture is wrong is counted on what
libjpeg or Pillow make of it when they are told to go on after errors.
"""

from __future__ import annotations

import io
import itertools
import json
import statistics
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from benchmarks import tables
from benchmarks.pipeline.mutations import JPEG, PNG, PROGRESSIVE, as_png, as_progressive
from largebatch.pipeline import DataError, Loader, Transform, check_data
from largebatch.recipes.training.folder.ending import processor

BACKENDS = ("dali-cpu", "torchvision")
NOTICES = ("check_before", "check", "dali-cpu", "torchvision", "strict")
#: A pixel is wrong if a channel differs by more than this many of 255 levels.
LEVELS = 8
#: A picture is wrong if more than this share of its pixels are.
VISIBLE = 0.01


class InMemory:
    """A source of images in memory, all of class 0."""

    kind = "in memory"
    classes = ("any",)

    def __init__(self, contents: list[bytes]) -> None:
        self._contents = [np.frombuffer(content, np.uint8) for content in contents]
        self.labels = np.zeros(len(contents), np.int64)

    @property
    def fingerprint(self) -> str:
        return str(len(self))

    def __len__(self) -> int:
        return len(self._contents)

    def name(self, index: int) -> str:
        return f"image {index}"

    def read(self, indices: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        return [self._contents[index] for index in indices]


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


def refuses(content: bytes, backend: str, verify: str) -> bool:
    """Whether an evaluation of this image alone stops."""
    loader = Loader(
        InMemory([content]),
        Transform(),
        batch_size=1,
        training=False,
        backend=backend,
        threads=1,
        verify=verify,
    )
    try:
        list(loader)
    except DataError:
        return True
    return False


def warns_only_at_one_size(content: bytes) -> bool:
    """Whether libjpeg warns at full size or at an eighth of it, but not at both."""
    from simplejpeg import decode_jpeg

    warned = []
    for options in ({}, {"colorspace": "GRAY", "min_height": 1, "min_width": 1}):
        try:
            decode_jpeg(content, **options)
            warned.append(False)
        except ValueError:
            warned.append(True)
    return warned[0] != warned[1]


def mutants(photographs: list[bytes], seed: int) -> Iterator[tuple[str, str, bytes, bytes]]:
    """Yield kind, extension, unharmed and damaged image."""
    ways = (
        (JPEG, "jpg", lambda content: content),
        (PROGRESSIVE, "jpg", as_progressive),
        (PNG, "png", as_png),
    )
    number = itertools.count()
    for kinds, extension, encode in ways:
        originals = [encode(content) for content in photographs]
        for kind, mutation in kinds.items():
            kind_number = next(number)
            for i, original in enumerate(originals):
                rng = np.random.default_rng([seed, kind_number, i])
                yield kind, extension, original, mutation(original, rng)


def detection(photographs: list[bytes], seed: int) -> dict[str, Any]:
    """Return the counts by kind.

    With them, as ``disagreements`` the number of images that ``strict`` refuses with one back end
    only, and as ``sizes`` the number of JPEG files that libjpeg warns about at one size only.
    """
    rows: dict[str, dict[str, Any]] = {}
    disagreements = sizes = 0
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, tuple[str, float, set[str]]] = {}
        for number, (kind, extension, original, damaged) in enumerate(mutants(photographs, seed)):
            path = Path(folder) / "train" / "any" / f"{number:05d}.{extension}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(damaged)
            notices = {b for b in BACKENDS if refuses(damaged, b, "decode")}
            strict = [refuses(damaged, b, "strict") for b in BACKENDS]
            disagreements += strict[0] != strict[1]
            sizes += extension == "jpg" and warns_only_at_one_size(damaged)
            notices |= {"strict"} if all(strict) else set()
            found[str(path)] = (kind, wrong_share(original, damaged), notices)
        report = check_data(folder)
    for finding in report.corrupt:
        found[finding.name][2].update(("check_before", "check"))
    for finding in report.damaged:
        found[finding.name][2].add("check")
    for kind, share, notices in found.values():
        row = rows.setdefault(
            kind,
            {"kind": kind, "mutants": 0, "wrong": 0, "wrong_unseen": 0, "unseen_shares": []}
            | dict.fromkeys(NOTICES, 0)
            | {"used_by_one": 0, "wrong_check_before": 0, "wrong_check": 0},
        )
        row["mutants"] += 1
        row["wrong"] += share > VISIBLE
        for who in ("check_before", "check"):
            row[f"wrong_{who}"] += share > VISIBLE and who in notices
        if share > VISIBLE and "strict" not in notices:
            row["wrong_unseen"] += 1
            row["unseen_shares"].append(round(share, 4))
        row["used_by_one"] += len(notices & set(BACKENDS)) == 1
        for who in notices:
            row[who] += 1
    return {"kinds": list(rows.values()), "disagreements": disagreements, "sizes": sizes}


def false_alarms(images: list[bytes], folder: Path) -> int:
    """Return how many images ``check_data`` calls corrupt or damaged."""
    for number, content in enumerate(images):
        extension = "png" if content.startswith(b"\x89PNG") else "jpg"
        path = folder / "train" / "any" / f"{number:06d}.{extension}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    report = check_data(folder)
    return len(report.corrupt) + len(report.damaged)


def table(found: dict[str, Any]) -> str:
    """Return the tables of the results."""
    columns = {
        "mutants": "images",
        "wrong": "wrong picture",
        "check_before": "`data check`: cannot be decoded",
        "check": "`data check`: with damage",
        "dali-cpu": "DALI stops",
        "torchvision": "torchvision stops",
        "used_by_one": "used by one of them only",
        "strict": "`strict` stops",
        "wrong_unseen": "wrong, not found by `strict`",
    }
    rows = found["kinds"]
    png = [row for row in rows if row["kind"] in PNG]
    jpeg = [row for row in rows if row not in png]
    sums = [
        {"kind": f"**{name}**", **{key: sum(row[key] for row in part) for key in columns}}
        for name, part in (("all JPEG", jpeg), ("all PNG", png), ("all", rows))
    ]
    cells = [
        (row["kind"], *(row[key] for key in columns)) for row in [*jpeg, sums[0], *png, *sums[1:]]
    ]
    lines = [tables.table({"damage": "l", **dict.fromkeys(columns.values(), "r")}, cells)]
    named = {key: sum(row[key] for row in rows) for key in ("wrong_check_before", "wrong_check")}
    unseen = [share for row in rows for share in row["unseen_shares"]]
    unharmed = "; ".join(f"{n:,} {what}: {alarms}" for what, n, alarms in found["unharmed"])
    packages = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines += [
        "",
        f"Of the {sums[-1]['wrong']} wrong pictures, `data check` names "
        f"{named['wrong_check']}, {named['wrong_check_before']} of them since they cannot be "
        f"decoded. A picture is wrong if more than {VISIBLE:.0%} of its pixels differ by more "
        f"than {LEVELS} of 255 levels in a "
        f"channel. In the {len(unseen)} wrong ones that `strict` does not find, {min(unseen):.0%} "
        f"to {max(unseen):.0%} of the pixels are wrong, in half of them at most "
        f"{statistics.median(unseen):.0%}.",
        "",
        f"Unharmed images that `data check` names: {unharmed}. Damaged images that `strict` "
        f"refuses with one back end only: {found['disagreements']} of {sums[-1]['mutants']}. "
        "Damaged JPEG files about which libjpeg warns at full size or at an eighth of it, but not "
        f"at both: {found['sizes']} of {sums[0]['mutants']}.",
        "",
        f"{found['date']}, {found['machine']}, seed {found['seed']}, {packages}",
    ]
    return "\n".join(lines) + "\n"


def _read_tar(path: Path) -> list[bytes]:
    with tarfile.open(path) as archive:
        files = sorted((m for m in archive if m.isfile()), key=lambda member: member.name)
        return [archive.extractfile(member).read() for member in files]


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--sample", type=Path, required=True, help="tar of ImageNet's JPEG files")
    parser.add_argument("--unharmed", type=Path, help="tar of further unharmed images")
    parser.add_argument("--photographs", type=int, default=20, help="damaged in each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=tables.RESULTS)
    options = parser.parse_args()
    sample = _read_tar(options.sample)
    chosen = np.random.default_rng(options.seed).choice(len(sample), options.photographs, False)
    photographs = [sample[i] for i in chosen]
    groups = {
        "photographs of ImageNet": sample,
        "of them as progressive JPEG": [as_progressive(c) for c in photographs],
        "of them as PNG": [as_png(c) for c in photographs],
    }
    if options.unharmed:
        groups[f"images of {options.unharmed.name}"] = _read_tar(options.unharmed)
    found = {
        **tables.origin("pillow", "simplejpeg"),
        "machine": f"{processor()}, {tables.cores()} cores",
        "seed": options.seed,
        **detection(photographs, options.seed),
        "unharmed": [],
    }
    for what, images in groups.items():
        with tempfile.TemporaryDirectory() as folder:
            found["unharmed"].append([what, len(images), false_alarms(images, Path(folder))])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "damaged_images.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / "damaged_images.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
