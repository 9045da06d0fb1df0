"""Claim: a network small enough for a grid on two cores, `airbench-b256`, reaches at least
88 % on CIFAR-10 at a batch of 256.

    largebatch data prepare cifar10 --archive FILE --out data/cifar10
    python -m benchmarks.recipes.small_network --data data/cifar10

Airbench's network is trained in several widths and image sizes, for several numbers of epochs and
in BF16 or FP32, one run on each core at a time, and scored on 5,000 training images that are held
out. The price of a run is its time on one core. The ResNet-9 of the older recipes is the rival.
Rates are one guess for all (`airbench-b256`), and that which was tuned for the ResNet-9.

Finished runs are written to benchmarks/results/small_network.json and are not repeated. Times only
compare if nothing else runs on the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.recipes.large_batch_single import Rows, Single, parser, provenance, run_missing
from benchmarks.recipes.large_batch_starts import HELD_OUT
from benchmarks.tables import RESULTS

RESULT = RESULTS / "small_network.json"


@dataclass(frozen=True)
class Network:
    """A network at an image size.

    Attributes:
        name: Name in the table.
        recipe: The recipe that it is a variant of.
        overrides: Its overrides of that recipe.
        mflop: Multiplications and additions of an image, forward and backward, in millions.
        epochs: Lengths that are trained in BF16.
        epochs_fp32: Lengths that are trained in FP32.
    """

    name: str
    recipe: str
    overrides: tuple[str, ...]
    mflop: float
    epochs: tuple[int, ...]
    epochs_fp32: tuple[int, ...] = ()


def _airbench(
    widths: tuple[int, int, int],
    size: int,
    mflop: float,
    epochs: tuple[int, ...],
    epochs_fp32: tuple[int, ...] = (),
) -> Network:
    text = f"[{', '.join(map(str, widths))}]"
    return Network(
        f"airbench {'/'.join(map(str, widths))} at {size} px",
        "airbench-b256",
        (
            f"model.args.widths={text}",
            f"data.image_size={size}",
            f"data.eval_resize={size}",
        ),
        mflop,
        epochs,
        epochs_fp32,
    )


NETWORKS = (
    _airbench((32, 128, 256), 24, 136.2, (10,)),
    _airbench((16, 64, 128), 32, 76.5, (10,)),
    _airbench((24, 128, 128), 24, 88.4, (10, 20)),
    _airbench((16, 64, 128), 24, 39.8, (10, 20)),
    _airbench((32, 64, 64), 24, 54.3, (10,), (10, 6)),
    _airbench((16, 64, 64), 32, 59.7, (), (10, 6)),
    _airbench((24, 64, 64), 24, 42.5, (), (10, 6)),
    Network("ResNet-9 of 16 channels at 24 px", "cifar10-nesterov-b256", (), 23.3, (20,)),
)


def runs() -> list[Single]:
    """Return the runs, one seed each."""
    wanted = []
    for network in NETWORKS:
        lengths = {"bf16": network.epochs, "fp32": network.epochs_fp32}
        for precision, epochs in ((name, n) for name, many in lengths.items() for n in many):
            overrides = [
                *network.overrides,
                f"precision={precision}",
                f"epochs={epochs}",
                f"data.holdout={HELD_OUT}",
            ]
            identity = {"network": network.name, "precision": precision, "epochs": epochs}
            wanted.append(Single(network.recipe, overrides, identity))
    return wanted


def table(rows: Rows) -> str:
    """Tabulate accuracy and time of each run, the most accurate first."""
    mflop = {network.name: network.mflop for network in NETWORKS}
    lines = [
        "| network | MFLOP per image | precision | epochs | top-1 % on held-out images, one seed "
        "| seconds per epoch and core | minutes of a run |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: -row["top1"]):
        seconds, operations = row["train_seconds"], mflop[row["network"]]
        lines.append(
            f"| {row['network']} | {operations:g} | {row['precision']} | {row['epochs']} "
            f"| {row['top1']:.2f} | {seconds / row['epochs']:.1f} | {seconds / 60:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    options = parser(__doc__).parse_args()
    rows = run_missing(RESULT, __doc__ or "", runs(), options.data, options.workers)
    text = f"{table(rows)}\n{provenance(rows)}\n"
    RESULT.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
