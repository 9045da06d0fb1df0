"""Claim: the loader gives at least 1.8 times the images of torchvision's and timm's, no less than
97 % of DALI's own pipeline, and a step that needs less than it gives does not wait.

    python -m benchmarks.pipeline.input --sample imagenet-sample.tar && python -m benchmarks.tables

The 200 real ImageNet photographs of the sample are copied as files of their own until there are
3,000, in 15 folders of all 200, and read often enough to lie in memory: this is the speed of
decoding, not of a disk. Each measurement is a process of its own, on one core and on two; the
contenders take turns, and rivals run with the best of the settings that were tried first.
Waiting is measured with steps of 50 ms that leave the cores alone, as those of a GPU do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from largebatch.recipes.training.summary import processor, versions

RESULTS = Path(__file__).parents[1] / "results"
IMAGES = 3000
BATCH = 64
STEP_SECONDS = 0.05
OURS = "ours"

#: Threads and prefetch that the loader takes on 2 cores.
DEFAULT = (2, 2)

Options = dict[str, Any]


def settings(contender: str, cores: int) -> list[Options]:
    """What is tried for each contender before it is measured."""
    workers = [cores, cores + 1]
    if contender == "torchvision":
        return [
            {"workers": w, "decoder": decoder, "prefetch_factor": 4}
            for w in workers
            for decoder in ("Pillow", "torchvision.io")
        ]
    if contender == "timm":
        return [{"workers": w, "prefetcher": p} for w in workers for p in (False, True)]
    if contender == "raw DALI":
        return [{"threads": threads} for threads in sorted({cores, cores + 1})]
    return [{}]


def run(**options: Any) -> dict[str, float]:
    """One measurement, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.pipeline.input_contenders", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{options}: {done.stderr[-2000:]}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def speed(data: str, cores: int, repeats: int, batches: int) -> list[dict[str, Any]]:
    """Images/s of each contender at its best settings."""
    fixed = {"data": data, "cores": cores, "batch": BATCH, "warm_up": 6, "batches": batches}
    best: dict[str, Options] = {}
    for contender in (OURS, "raw DALI", "torchvision", "timm"):
        tried = [
            (run(contender=contender, **fixed, **choice)["images_per_second"], choice)
            for choice in settings(contender, cores)
        ]
        best[contender] = max(tried, key=lambda pair: pair[0])[1]
        print(cores, "cores:", contender, [(round(rate), choice) for rate, choice in tried])
    rates: dict[str, list[float]] = {contender: [] for contender in best}
    for _ in range(repeats):
        for contender, choice in best.items():
            measured = run(contender=contender, **fixed, **choice)
            rates[contender].append(measured["images_per_second"])
    return [
        {
            "cores": cores,
            "contender": contender,
            "settings": best[contender],
            "images_per_second": [round(rate, 1) for rate in rates[contender]],
            "median": statistics.median(rates[contender]),
            # turn by turn, so that what slows the machine falls on both
            "ours_against": statistics.median(
                a / b for a, b in zip(rates[OURS], rates[contender], strict=True)
            ),
        }
        for contender in best
    ]


def waiting(data: str, rate: float, repeats: int) -> list[dict[str, Any]]:
    """Share of the time that steps of 50 ms wait which need 50 and 80 % of what there is."""
    rows = []
    for share in (0.5, 0.8):
        batch = max(1, int(share * rate * STEP_SECONDS))
        fixed = {"data": data, "cores": 2, "batch": batch, "batches": 150}
        found: dict[str, list[dict[str, float]]] = {OURS: [], "raw DALI": []}
        for _ in range(repeats):
            for contender, measured in found.items():
                measured.append(run(contender=contender, step_seconds=STEP_SECONDS, **fixed))
        rows += [
            {
                "contender": contender,
                "batch": batch,
                "needed_share": round(batch / STEP_SECONDS / rate, 2),
                "wait_shares": [round(m["wait_share"], 5) for m in measured],
                "longest_wait_ms": round(max(m["longest_wait_ms"] for m in measured), 1),
            }
            for contender, measured in found.items()
        ]
    return rows


def grid(data: str, repeats: int, batches: int) -> list[dict[str, Any]]:
    """Images/s by threads and prefetch depth, on 2 cores."""
    choices: list[Options] = [{"threads": t, "prefetch": p} for t in (1, 2, 3) for p in (1, 2, 4)]
    rates: list[list[float]] = [[] for _ in choices]
    fixed = {"data": data, "cores": 2, "batch": BATCH, "warm_up": 8, "batches": batches}
    for _ in range(repeats):
        for choice, found in zip(choices, rates, strict=True):
            found.append(run(contender=OURS, **fixed, **choice)["images_per_second"])
    return [
        {
            **choice,
            "images_per_second": [round(r, 1) for r in found],
            "median": statistics.median(found),
        }
        for choice, found in zip(choices, rates, strict=True)
    ]


def write_data(sample: Path, folder: Path) -> Path:
    """A data set of ``IMAGES`` files, copies of those in the archive."""
    originals = folder / "originals"
    with tarfile.open(sample) as archive:
        archive.extractall(originals, filter="data")
    files = sorted(originals.rglob("*.JPEG"))
    for i in range(IMAGES):
        source = files[i % len(files)]
        # Every class has a share of each photograph: DALI's reader shuffles nearby files only, and
        # would otherwise be measured on fewer of them than the others.
        target = folder / "data" / "train" / f"{i // len(files):02d}" / f"{i:05d}.JPEG"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    shutil.rmtree(originals)
    return folder / "data"


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The tables, by the name of the file."""
    lines = [
        "| cores | loader | images/s, median | spread | ours against it |",
        "|---:|---|---:|---:|---:|",
    ]
    for row in found["speed"]:
        rates = row["images_per_second"]
        chosen = ", ".join(f"{k} {v}" for k, v in row["settings"].items())
        name = f"{row['contender']}{f' ({chosen})' if chosen else ''}"
        lines.append(
            f"| {row['cores']} | {name} | {row['median']:,.0f} "
            f"| {min(rates):,.0f} to {max(rates):,.0f} | {row['ours_against']:.2f} |"
        )
    lines += [
        "",
        "| loader | batch of a 50 ms step | of what ours gives | waiting, from the second step on "
        "| spread | longest wait |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in found["waiting"]:
        shares = [100 * share for share in row["wait_shares"]]
        lines.append(
            f"| {row['contender']} | {row['batch']} | {100 * row['needed_share']:.0f} % "
            f"| {statistics.median(shares):.1f} % of the time "
            f"| {min(shares):.1f} to {max(shares):.1f} % | {row['longest_wait_ms']:.0f} ms |"
        )
    choices = [
        "| threads | prefetch | images/s, median | spread | repeats |",
        "|---:|---:|---:|---:|---:|",
    ]
    for row in found["grid"]:
        rates = row["images_per_second"]
        default = " (default)" if (row["threads"], row["prefetch"]) == DEFAULT else ""
        choices.append(
            f"| {row['threads']} | {row['prefetch']}{default} "
            f"| {row['median']:,.0f} | {min(rates):,.0f} to {max(rates):,.0f} | {len(rates)} |"
        )
    packages = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    machine = f"{found['date']}, {found['machine']}"
    about = f"{machine}, {found['repeats']} repeats, {packages}"
    return {
        "input": "\n".join([*lines, "", about]) + "\n",
        "input_auto": "\n".join([*choices, "", f"{machine}, {packages}"]) + "\n",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sample", type=Path, required=True, help="tar of ImageNet's JPEG files")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, default=24, help="of 64 images, in a measurement")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = str(write_data(options.sample, Path(folder)))
        rows = [
            row for cores in (1, 2) for row in speed(data, cores, options.repeats, options.batches)
        ]
        rate = next(r["median"] for r in rows if r["cores"] == 2 and r["contender"] == OURS)
        found = {
            "date": date.today().isoformat(),
            "machine": f"{processor()}, {os.cpu_count()} cores",
            "versions": versions(),
            "repeats": options.repeats,
            "images": IMAGES,
            "batch": BATCH,
            "speed": rows,
            "waiting": waiting(data, rate, options.repeats),
            "grid": grid(data, (options.repeats + 1) // 2, options.batches),
        }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "input.json").write_text(json.dumps(found, indent=2) + "\n")
    for name, text in tables(found).items():
        (options.out / f"{name}.md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
