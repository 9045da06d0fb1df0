"""Claim: the loader has at least 1.25 times the throughput of a plain DALI pipeline and 1.8 times
that of torchvision's and timm's, and a step that consumes three quarters of it waits under 2 %.

    python -m benchmarks.pipeline.input --sample imagenet-sample.tar

The 200 real ImageNet photographs of the sample are copied to 3,000 separate files, in 15 folders of
200, and read often enough to be cached in memory: this measures decoding, not a disk. Each
measurement is a process of its own, on one core and on two. The contenders take turns, and each
rival runs with the best of the settings tried first. Waiting is measured with steps of 50 ms that
do not use the CPU, as those of a GPU. The same photographs, stored at 256 pixels as by ``largebatch
data prepare --resize 256``, show what that gains, and smaller ones for which images ``auto`` should
choose which back end.
"""

from __future__ import annotations

import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import tables
from largebatch.pipeline.decode.pillow import decode
from largebatch.pipeline.prepare.shrink import shrink
from largebatch.recipes.training.folder.ending import processor

RESULTS = tables.RESULTS
IMAGES = 3000
BATCH = 64
STEP_SECONDS = 0.05
QUALITY = 90
OURS = "ours"
OURS_BY_DALI = "ours with data.backend=dali-cpu"
OURS_AT_256 = "ours, files stored at 256 px"
RIVALS = ("raw DALI", "torchvision", "timm")
#: Sides of small images in pixels: squares that are stored and read at this size.
SMALL = (32, 64, 128, 192)
#: What the back ends for the CPU are compared on: name, folder, and size of the crops.
KINDS = (
    *((f"{size} px", str(size), size) for size in SMALL),
    ("stored at 256 px, cropped to 224", "256", 224),
    ("ImageNet's files, cropped to 224", "whole", 224),
)

Options = dict[str, Any]


def settings(contender: str, cores: int) -> list[Options]:
    """Return the settings to try for a contender before it is measured."""
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
    """Make one measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.pipeline.input_contenders", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{options}: {done.stderr[-2000:]}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def speed(data: Path, cores: int, repeats: int, batches: int) -> list[dict[str, Any]]:
    """Measure the images/s of each contender with its best settings."""
    fixed = {"cores": cores, "batch": BATCH, "warm_up": 6, "batches": batches}
    whole = {"data": str(data / "whole"), **fixed}
    best: dict[str, Options] = {}
    for contender in RIVALS:
        tried = [
            (run(contender=contender, **whole, **choice)["images_per_second"], choice)
            for choice in settings(contender, cores)
        ]
        best[contender] = max(tried, key=lambda pair: pair[0])[1]
        print(cores, "cores:", contender, [(round(rate), choice) for rate, choice in tried])
    calls: dict[str, Options] = {
        OURS: {"contender": OURS, **whole},
        OURS_BY_DALI: {"contender": OURS, "backend": "dali-cpu", **whole},
        OURS_AT_256: {"contender": OURS, "data": str(data / "256"), **fixed},
        **{name: {"contender": name, **whole, **choice} for name, choice in best.items()},
    }
    rates: dict[str, list[float]] = {contender: [] for contender in calls}
    for _ in range(repeats):
        for contender, call in calls.items():
            rates[contender].append(run(**call)["images_per_second"])
    return [
        {
            "cores": cores,
            "contender": contender,
            "settings": best.get(contender, {}),
            "images_per_second": [round(rate, 1) for rate in rates[contender]],
            "median": statistics.median(rates[contender]),
            # per turn, so that disturbances of the machine affect both
            "ours_against": statistics.median(
                a / b for a, b in zip(rates[OURS], rates[contender], strict=True)
            ),
        }
        for contender in calls
    ]


def waiting(data: str, rate: float, repeats: int) -> list[dict[str, Any]]:
    """Measure how long steps of 50 ms wait that consume 50 % and 75 % of the throughput."""
    rows = []
    for share in (0.5, 0.75):
        batch = max(1, round(share * rate * STEP_SECONDS))
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


def compared(data: Path, repeats: int, batches: int) -> list[dict[str, Any]]:
    """Measure images/s of both back ends for the CPU on images of several sizes, on 2 cores."""
    backends = ("nvimgcodec", "dali-cpu")
    rates: dict[tuple[str, str], list[float]] = {(k[0], b): [] for k in KINDS for b in backends}
    fixed = {"contender": OURS, "cores": 2, "batch": 4 * BATCH, "warm_up": 6, "batches": batches}
    for _ in range(repeats):
        for name, folder, size in KINDS:
            for backend in backends:
                place = {"data": str(data / folder), "size": size}
                measured = run(backend=backend, **place, **fixed)
                rates[name, backend].append(measured["images_per_second"])
    return [
        {
            "images": name,
            **{b: statistics.median(rates[name, b]) for b in backends},
            "ratios": [
                round(a / b, 2) for a, b in zip(*(rates[name, b] for b in backends), strict=True)
            ],
        }
        for name, _, _ in KINDS
    ]


def write_data(sample: Path, folder: Path) -> Path:
    """Write data sets of ``IMAGES`` files, which are copies of those in the archive."""
    with tarfile.open(sample) as archive:
        archive.extractall(folder / "originals", filter="data")
    files = sorted((folder / "originals").rglob("*.JPEG"))
    for i, path in enumerate(files):
        content = path.read_bytes()
        stored = {"whole": content, "256": shrink(content, 256, QUALITY) or content}
        picture = decode(np.frombuffer(content, np.uint8))
        for size in SMALL:
            file = io.BytesIO()
            picture.resize((size, size)).save(file, "JPEG", quality=QUALITY)
            stored[str(size)] = file.getvalue()
        # Every class holds all photographs: DALI's reader only shuffles nearby files, and would
        # otherwise be measured on fewer photographs than the others.
        for copy in range(IMAGES // len(files)):
            for name, encoded in stored.items():
                target = folder / name / "train" / f"{copy:02d}" / f"{i:05d}.JPEG"
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(encoded)
    return folder


def rendered(found: dict[str, Any]) -> dict[str, str]:
    """Return the tables by file name."""
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
    sizes = [
        "| images | nvimgcodec, images/s | dali-cpu, images/s | ratio in each turn |",
        "|---|---:|---:|---|",
    ]
    for row in found["compared"]:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in row["ratios"])
        sizes.append(
            f"| {row['images']} | {row['nvimgcodec']:,.0f} | {row['dali-cpu']:,.0f} | {ratios} |"
        )
    packages = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    machine = f"{found['date']}, {found['machine']}"
    about = f"{machine}, {found['repeats']} repeats, {packages}"
    return {
        "input": "\n".join([*lines, "", about]) + "\n",
        "input_backends": "\n".join([*sizes, "", f"{machine}, {packages}"]) + "\n",
    }


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--sample", type=Path, required=True, help="tar of ImageNet's JPEG files")
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2], help="2 must be among them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--batches", type=int, default=24, help="batches of 64 images per measurement"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(options.sample, Path(folder))
        whole = str(data / "whole")
        rows = [
            row
            for cores in options.cores
            for row in speed(data, cores, options.repeats, options.batches)
        ]
        rate = next(r["median"] for r in rows if r["cores"] == 2 and r["contender"] == OURS)
        found = {
            **tables.origin(),
            "machine": f"{processor()}, {tables.cores()} cores",
            "repeats": options.repeats,
            "images": IMAGES,
            "batch": BATCH,
            "speed": rows,
            "waiting": waiting(whole, rate, options.repeats),
            "compared": compared(data, options.repeats, options.batches),
        }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "input.json").write_text(json.dumps(found, indent=2) + "\n")
    for name, text in rendered(found).items():
        (options.out / f"{name}.md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
