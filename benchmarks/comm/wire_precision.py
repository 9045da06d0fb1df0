"""Claim: with thousands of ranks, FP16 gradients that are divided in part before and in part after
their sum keep what a division before it loses, and sums in FP32 keep it without overflow.

    python -m benchmarks.comm.wire_precision

All ranks are emulated in one process, in the order in which gloo's ranks add (summation.py, which
tests compare with real ranks bit by bit), and compared with the mean in FP64. Gradients are

- normal, of mean zero and one standard deviation;
- log-normal: the standard deviation of each element is that times exp(2 z), z normal, and its mean
  over all ranks a tenth of its own standard deviation (times a normal number);
- real: of a small convolutional network on digits, each rank with 8 images, times a loss scale.

Nothing is timed. About three minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.comm.summation import ORDERS, emulated_average
from benchmarks.tables import RESULTS
from largebatch.comm import WIRE_DTYPES, Rule
from largebatch.comm.averaging import Averaging
from largebatch.recipes.training.summary import processor, versions

RANKS = (8, 64, 256, 1000, 1024, 2048, 4096)
STDS = (1e-6, 1e-5, 1e-4, 1e-2, 1.0, 1e2, 1e4)
RANKS_PER_NODE = 8
VALUES = 2**21  # of all ranks together, at most
MOST_ELEMENTS = 2**14
LEAST_SHOWN = 0.001  # of means that became zero
SPREAD, SIGNAL = 2.0, 0.1  # of log-normal gradients

BEFORE, SPLIT, AFTER = "FP16, p before", "FP16, f before, p/f after", "FP16, p after"
FP32_SUMS, BF16, BF16_SUMS = "FP16, FP32 sums", "BF16, p before", "BF16, FP32 sums"
WAYS = (BEFORE, SPLIT, AFTER, FP32_SUMS, BF16, BF16_SUMS)


def rule(way: str, algorithm: str, ranks: int) -> Rule:
    """Return the rule of a way; sums in FP32 are hierarchical."""
    wire = way[:4].lower()
    if way in (FP32_SUMS, BF16_SUMS):
        return Rule("hierarchical", wire_dtype=wire, sum_dtype="fp32")
    factor = {BEFORE: ranks, SPLIT: None, AFTER: 1, BF16: None}[way]
    return Rule(algorithm, wire_dtype=wire, predivide_factor=factor)


def synthetic(kind: str, ranks: int, std: float, seed: int) -> Tensor:
    """Gradients of all ranks, FP32, shape (ranks, elements)."""
    generator = torch.Generator().manual_seed(seed)
    elements = min(MOST_ELEMENTS, VALUES // ranks)
    noise = torch.randn(ranks, elements, generator=generator)
    if kind == "normal":
        return noise * std
    scales = std * torch.randn(elements, generator=generator).mul_(SPREAD).exp_()
    means = SIGNAL * torch.randn(elements, generator=generator)
    return (noise + means) * scales


class Digits(nn.Sequential):
    """A convolutional network of 4,000 parameters for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(256, 10),
        )


def real(ranks: int, steps: int, seed: int) -> Tensor:
    """Gradients of all ranks after some steps of SGD, 8 images drawn at random for each rank."""
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    model = Digits()

    def loss(parameters: dict[str, Tensor], batch: Tensor, truth: Tensor) -> Tensor:
        outputs = torch.func.functional_call(model, parameters, (batch,))
        return nn.functional.cross_entropy(outputs, truth)

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradient = torch.func.grad(loss)
    for _ in range(steps):
        drawn = torch.randint(len(images), (256,))
        step = gradient(parameters, images[drawn], labels[drawn])
        parameters = {name: p - 0.1 * step[name] for name, p in parameters.items()}
    drawn = torch.randint(len(images), (ranks, 8))
    each = torch.func.vmap(gradient, (None, 0, 0), chunk_size=64)(
        parameters, images[drawn], labels[drawn]
    )
    return torch.cat([part.flatten(1) for part in each.values()], 1)


def judge(
    gradients: Tensor, own: Tensor, way: str, algorithm: str, sizes: list[int] | None
) -> dict[str, float]:
    """Compare a way with the FP64 mean of ``gradients``, which the ranks hold as ``own``.

    Args:
        sizes: the numbers of elements of the parameters that the gradients are of, if they are.
    """
    ranks = len(gradients)
    chosen = rule(way, algorithm, ranks)
    assert chosen.wire_dtype is not None
    before = Averaging.of(own.dtype, ranks, chosen).before
    sent = own.div(before).to(WIRE_DTYPES[chosen.wire_dtype])
    mean = gradients.double().mean(0)
    got = emulated_average(own, chosen, RANKS_PER_NODE).double()
    finite = got.isfinite()
    found = {
        "sent_as_zero": ((sent == 0) & (gradients != 0)).double().mean().item(),
        "zero": ((got == 0) & (mean != 0)).double().mean().item(),
        "overflow": (~finite).double().mean().item(),
    }
    # Of what has not overflowed; 1 if everything has.
    missed = (got - mean)[finite].norm() / mean[finite].norm() if finite.any() else torch.ones(())
    found["error"] = missed.item()
    if sizes:
        errors = (got - mean).where(finite, 0).split(sizes)
        found["worst_parameter"] = max(
            (error.norm() / part.norm()).item()
            for error, part in zip(errors, mean.split(sizes), strict=True)
        )
    return found


def row(
    draws: list[Tensor], way: str, algorithm: str, half: bool, sizes: list[int] | None
) -> dict[str, Any]:
    """Judge a way on several draws of gradients; ``half``: they are in the wire dtype already."""
    judged = []
    for gradients in draws:
        own = gradients.to(WIRE_DTYPES[way[:4].lower()]) if half else gradients
        judged.append(judge(gradients, own, way, algorithm, sizes))
    return {key: [float(f"{one[key]:.4g}") for one in judged] for key in judged[0]}


def measure(seeds: range) -> Iterator[dict[str, Any]]:
    """Yield a row for each case."""

    def rows(
        draws: list[Tensor],
        orders: tuple[str, ...],
        sizes: list[int] | None = None,
        **case: Any,
    ) -> Iterator[dict[str, Any]]:
        for algorithm in orders:
            for half in (False, True) if case["ranks"] == 2048 else (False,):
                for way in WAYS:
                    if way in (FP32_SUMS, BF16_SUMS) and algorithm != "hierarchical":
                        continue
                    about = {**case, "algorithm": algorithm, "half_gradients": half, "way": way}
                    yield {**about, **row(draws, way, algorithm, half, sizes)}

    every = tuple(ORDERS)
    for ranks in RANKS:
        for kind in ("normal", "log-normal"):
            for std in STDS:
                draws = [synthetic(kind, ranks, std, seed) for seed in seeds]
                orders = every if std == 1e-4 else ("ring", "hierarchical")
                yield from rows(draws, orders, gradients=kind, ranks=ranks, std=std)
        print(ranks, "ranks", flush=True)
    sizes = [parameter.numel() for parameter in Digits().parameters()]
    for steps in (0, 200):
        drawn = [real(2048, steps, seed) for seed in seeds]
        for loss_scale in (1, 1024):
            draws = [loss_scale * gradients for gradients in drawn]
            yield from rows(
                draws,
                ("hierarchical",),
                sizes,
                gradients=f"digits after {steps} steps",
                ranks=2048,
                loss_scale=loss_scale,
                std=sum(gradients.std().item() for gradients in draws) / len(draws),
            )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def percent(value: float) -> str:
    if 0 < value < 0.0001:
        return "< 0.01 %"
    return f"{100 * value:.2g} %" if value < 0.995 else f"{100 * value:.0f} %"


def cell(found: dict[str, Any]) -> str:
    """Error and means that became zero, or overflows, if there are any."""
    if mean(found["overflow"]):
        return f"**overflow {percent(mean(found['overflow']))}**"
    text = percent(mean(found["error"]))
    if "loss_scale" in found:
        text += f", worst {percent(mean(found['worst_parameter']))}"
    zero = mean(found["zero"])
    return f"{text} ({percent(zero)})" if zero >= LEAST_SHOWN else text


def table(
    rows: list[dict[str, Any]], ways: tuple[str, ...], heads: dict[str, Any], **case: Any
) -> str:
    """A line for each value of ``heads`` (column -> key of a row), a column for each way."""
    chosen = [r for r in rows if all(r.get(key) == value for key, value in case.items())]
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for one in chosen:
        first = tuple(show(one[key]) for key in heads.values())
        lines.setdefault(first, {})[one["way"]] = cell(one)
    text = ["| " + " | ".join((*heads, *ways)) + " |"]
    text.append("|---:" * (len(heads) + len(ways)) + "|")
    for first, cells in lines.items():
        text.append("| " + " | ".join((*first, *(cells.get(way, "") for way in ways))) + " |")
    return "\n".join(text)


def show(value: Any) -> str:
    if isinstance(value, float):
        if value >= 1 and value < 100:
            return f"{value:.2g}"
        return f"{value:.1e}".replace(".0", "").replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,}" if isinstance(value, int) else str(value)


def lost_table(rows: list[dict[str, Any]]) -> str:
    """Gradients that are sent as zero, and their mean."""
    text = ["| p | f | " + " | ".join(f"{way}: sent as zero | error" for way in (BEFORE, SPLIT))]
    text = [text[0] + " |", "|---:" * 6 + "|"]
    for ranks in RANKS:
        cells = [f"{ranks:,}", f"{Averaging.of(torch.float16, ranks, Rule('ring')).before}"]
        for way in (BEFORE, SPLIT):
            found = next(
                r
                for r in rows
                if r["gradients"] == "normal"
                and (r["ranks"], r["std"], r["way"]) == (ranks, 1e-4, way)
                and (r["algorithm"], r["half_gradients"]) == ("ring", False)
            )
            cells += [percent(mean(found["sent_as_zero"])), percent(mean(found["error"]))]
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text)


def report(result: dict[str, Any]) -> str:
    """The tables, in Markdown."""
    rows = result["rows"]
    of = {"half_gradients": False, "algorithm": "hierarchical"}
    spreads = [
        (max(r["error"]) - min(r["error"])) / mean(r["error"])
        for r in rows
        if r["gradients"] == "log-normal" and not mean(r["overflow"]) and mean(r["error"])
    ]
    normal = [
        (max(r["error"]) - min(r["error"])) / mean(r["error"])
        for r in rows
        if r["gradients"] == "normal" and not mean(r["overflow"]) and mean(r["error"])
    ]
    head = {"standard deviation": "std"}
    parts = [
        "FP32 gradients, normal, of standard deviation 1e-4, sent in FP16, `ring`:",
        lost_table(rows),
        "Relative error of the mean gradient, in brackets the share of means that became zero, "
        "from 0.1 % on; the same gradients, `hierarchical` with 8 ranks per node:",
        table(rows, WAYS, {"p": "ranks"}, gradients="normal", std=1e-4, **of),
        "Log-normal gradients by their standard deviation, with any loss scale in it, p = 2,048:",
        table(rows, WAYS, head, gradients="log-normal", ranks=2048, **of),
        "p = 64:",
        table(rows, WAYS, head, gradients="log-normal", ranks=64, **of),
        "Gradients that are in FP16 or BF16 themselves, as is then their mean, p = 2,048:",
        table(
            rows, WAYS, head, gradients="log-normal", ranks=2048, **{**of, "half_gradients": True}
        ),
        "By algorithm, normal, of standard deviation 1e-4, p = 4,096:",
        table(
            rows,
            (BEFORE, SPLIT, AFTER, BF16),
            {"algorithm": "algorithm"},
            gradients="normal",
            std=1e-4,
            ranks=4096,
            half_gradients=False,
        ),
        "Gradients of a small network on digits, p = 2,048 ranks with 8 images each, FP32; the "
        "error of all parameters together and of the worst one:",
        table(
            [r for r in rows if "loss_scale" in r],
            WAYS,
            {"gradients": "gradients", "loss scale": "loss_scale", **head},
            **of,
        ),
        f"p ranks, emulated in one process; f is the smallest power of two from √p on. Means of "
        f"{result['draws']} draws; the errors of single draws lie up to {max(normal):.0%} (normal) "
        f"and {max(spreads):.0%} (log-normal) apart. {result['date']}, {processor()}, "
        + ", ".join(f"{package} {number}" for package, number in result["versions"].items()),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=5, help="draws of gradients for each case")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = list(measure(range(options.draws)))
    result = {
        "claim": "a division in part before and in part after the sum keeps small FP16 gradients",
        "date": date.today().isoformat(),
        "machine": {"processor": processor(), "cores": len(os.sched_getaffinity(0))},
        "versions": versions(),
        "ranks_per_node": RANKS_PER_NODE,
        "draws": options.draws,
        "rows": rows,
    }
    options.out.mkdir(exist_ok=True, parents=True)
    lines = ",\n".join(json.dumps(one) for one in rows)  # a line for each case
    about = json.dumps({**result, "rows": []}, indent=1)
    text = about.replace('"rows": []', f'"rows": [\n{lines}\n]')
    (options.out / "wire_precision.json").write_text(text + "\n")
    (options.out / "wire_precision.md").write_text(report(result))
    print(report(result))


if __name__ == "__main__":
    main()
