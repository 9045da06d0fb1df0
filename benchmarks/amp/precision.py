"""Claim: on digits, fp16-master reaches the accuracy of FP32 within 0.5 points over three seeds,
and LARS applied to FP16 weights directly does not, or trains visibly slower.

    python -m benchmarks.amp.precision

The recipe digits with model.name=test_resnet (0.4 M parameters), at its own learning rate and at
an eighth of it, where updates are smaller. LARS on FP16 weights is run in two ways: ours without
masters (fp16-pure: weights and momentum in FP16, arithmetic in FP32) and one that computes all of
LARS in FP16 (fp16_lars.py, static loss scale 1024). FP16 convolutions and matrix products have FP16
inputs and outputs and FP32 sums, as on tensor cores (fp16_on_cpu.py). Runs share the cores, one
thread each, so only accuracy is compared.

The results also include the fractions of gradients and updates that FP16 flushes to zero (20 steps
from the start and 20 from a late checkpoint of the unmodified recipe), and the bytes per parameter
of each precision on ResNet-50, counted tensor by tensor. About 20 minutes on 2 cores.
"""

from __future__ import annotations

import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import timm
import torch

from benchmarks import tables
from benchmarks.amp.fp16_lars import fp16_lars
from benchmarks.amp.fp16_on_cpu import fp16_with_fp32_sums
from largebatch.amp import PRECISIONS, Precision
from largebatch.amp.convert import is_norm
from largebatch.lars import LARS
from largebatch.pipeline import prepare_digits
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.metrics import read_metrics
from largebatch.recipes.training.trainer import Trainer
from largebatch.recipes.tune.precision import tune_precision

FP16_LARS = "LARS in FP16"
TRAINED = ("fp32", "bf16-master", "fp16-master", "fp16-pure", FP16_LARS)
RATES = (4.0, 0.5)
SEEDS = (0, 1, 2)
RESULTS = tables.RESULTS
GOAL_POINTS = 0.5
REACHED = 95.0


def train(folder: Path, name: str, lr: float, seed: int) -> dict[str, Any]:
    """Train digits once; return the validation top-1 by epoch and the number of skipped steps."""
    torch.set_num_threads(1)
    run_dir = folder / f"{name}-{lr}-{seed}"
    precision = "fp16-pure" if name == FP16_LARS else name
    keys = [f"data.path={folder / 'digits'}", f"run_dir={run_dir}", f"seed={seed}"]
    keys += [f"precision={precision}", f"optimizer.lr={lr}", "model.name=test_resnet"]
    keys += ["evaluate_every=1ep", "checkpoint.every=null", "data.threads=1"]
    with ExitStack() as stack:
        if PRECISIONS[precision].compute == torch.float16:
            stack.enter_context(fp16_with_fp32_sums())
        if name == FP16_LARS:
            keys.append("loss_scale=1024")
            stack.enter_context(
                patch("largebatch.recipes.training.build.build_optimizer", fp16_lars)
            )
        Trainer(load("digits", keys), Job(0, 1, 1, torch.device("cpu")), quiet=True).run()
    lines = read_metrics(run_dir)
    val = [line for line in lines if line["split"] == "val"]
    last = [line for line in lines if line["split"] == "train"][-1]
    return {
        "precision": name,
        "lr": lr,
        "seed": seed,
        "top1": round(val[-1]["top1"], 2),
        "train_loss": round(last["loss"], 4),
        "epochs_to_95": next((line["epoch"] for line in val if line["top1"] >= REACHED), None),
        "skipped_steps": int(last.get("skipped_steps", 0)),
        "top1_by_epoch": [round(line["top1"], 2) for line in val],
    }


def accuracy_table(runs: list[dict[str, Any]]) -> str:
    seeds = sorted({run["seed"] for run in runs})
    columns = {"learning rate": "r", "precision": "l", **{f"seed {seed}": "r" for seed in seeds}}
    last = ("mean top-1 %", "against FP32", f"epochs to {REACHED:.0f} %")
    columns |= dict.fromkeys((*last, "training loss at the end"), "r")
    rows = []
    for lr in RATES:
        base = mean_top1(select(runs, "fp32", lr))
        for name in TRAINED:
            of_name = select(runs, name, lr)
            reached = [run["epochs_to_95"] for run in of_name]
            rows.append([
                f"{lr:g}",
                f"`{name}`" if name in PRECISIONS else name,
                *(f"{next(r['top1'] for r in of_name if r['seed'] == seed):.2f}" for seed in seeds),
                f"{mean_top1(of_name):.2f}",
                f"{mean_top1(of_name) - base:+.2f}",
                "not by all" if None in reached else f"{statistics.mean(reached):.1f}",
                f"{statistics.mean(r['train_loss'] for r in of_name):.4f}",
            ])  # fmt: skip
    return tables.table(columns, rows)


def select(runs: list[dict[str, Any]], name: str, lr: float) -> list[dict[str, Any]]:
    return [run for run in runs if (run["precision"], run["lr"]) == (name, lr)]


def mean_top1(runs: list[dict[str, Any]]) -> float:
    return statistics.mean(run["top1"] for run in runs)


def flushed(folder: Path, resume: Path | None, when: str) -> dict[str, Any]:
    keys = [f"data.path={folder / 'digits'}"]
    keys += [f"resume={resume}"] if resume else []
    return {"when": when, **tune_precision("digits", keys, steps=20).numbers()}


def late_flushed(folder: Path) -> dict[str, Any]:
    """Return the flushed fractions of 20 steps after three quarters of the run."""
    keys = [f"data.path={folder / 'digits'}", f"run_dir={folder / 'late'}", "precision=fp32"]
    keys += ["evaluate_every=null", "checkpoint.every=null", "stop_after=84"]
    Trainer(load("digits", keys), Job(0, 1, 1, torch.device("cpu")), quiet=True).run()
    return flushed(folder, folder / "late" / "checkpoints" / "step-00000084", "85 to 104")


def flushed_table(reports: list[dict[str, Any]]) -> str:
    columns = ("gradients flushed, no scale", "worst layer", "best loss scale")
    columns += ("gradients flushed there", "updates flushed", "updates lost in FP16 weights")
    rows = []
    for report in reports:
        total = report["total"]
        worst = max(report["layers"], key=lambda layer: layer["gradients_flushed_unscaled"])
        rows.append([
            report["when"],
            f"{total['gradients_flushed_unscaled']:.1%}",
            f"{worst['gradients_flushed_unscaled']:.0%} ({worst['layer']})",
            f"{report['best_loss_scale']:g}",
            f"{total['gradients_flushed_at_best_scale']:.2%}",
            f"{total['updates_flushed']:.1%}",
            f"{total['updates_lost']:.0%}",
        ])  # fmt: skip
    return tables.table({"steps of digits": "l", **dict.fromkeys(columns, "r")}, rows)


def bytes_per_parameter(name: str) -> dict[str, Any]:
    """Return the bytes per parameter of ResNet-50 with LARS, by kind of tensor, after a step."""
    torch.manual_seed(0)
    precision = Precision(name, loss_scale="none")
    model = precision.convert(timm.create_model("resnet50"))
    optimizer = LARS(model.parameters(), 0.1, master_weights=precision.form.masters)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    precision.step(optimizer)
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    norms = sum(p.numel() for m in model.modules() if is_norm(m) for p in m.parameters(False))
    states = [optimizer.state[p] for p in parameters]
    kinds = {
        "parameters": sum(p.nbytes for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
        "masters": sum(s["master"].nbytes for s in states if "master" in s),
        "momentum": sum(s["momentum_buffer"].nbytes for s in states),
    }
    per_parameter = {kind: size / count for kind, size in kinds.items()}
    return {
        "precision": name,
        **per_parameter,
        "all": sum(per_parameter.values()),
        # DDP's buckets contain the gradients in their own dtypes.
        "reduced_megabytes": kinds["gradients"] / 1e6,
        "share_in_norm_layers": norms / count,
    }


def bytes_table(rows: list[dict[str, Any]]) -> str:
    kinds = ("parameters", "gradients", "masters", "momentum", "all")
    columns = ("parameters", "gradients", "FP32 masters", "momentum", "together")
    columns += ("all-reduced per step, MB",)
    cells = [
        [f"`{row['precision']}`", *(f"{row[kind]:.3g}" for kind in kinds),
         f"{row['reduced_megabytes']:.1f}"]
        for row in rows
    ]  # fmt: skip
    return tables.table({"precision": "l", **dict.fromkeys(columns, "r")}, cells)


def main() -> None:
    tables.parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare_digits(folder / "digits")
        asked = [(folder, name, lr, seed) for seed in SEEDS for lr in RATES for name in TRAINED]
        runs = []
        with ProcessPoolExecutor(tables.cores(), get_context("spawn")) as pool:
            for run in pool.map(train, *zip(*asked, strict=True)):
                runs.append(run)
                print({k: v for k, v in run.items() if k != "top1_by_epoch"}, flush=True)
        reports = [flushed(folder, None, "1 to 20"), late_flushed(folder)]
    rows = [bytes_per_parameter(name) for name in PRECISIONS]
    means = {
        f"{name}, {lr:g}": mean_top1(select(runs, name, lr)) for name in TRAINED for lr in RATES
    }
    within = all(
        abs(means[f"fp16-master, {lr:g}"] - means[f"fp32, {lr:g}"]) <= GOAL_POINTS for lr in RATES
    )
    result = {
        "claim": tables.claim_of(__doc__),
        **tables.origin(),
        "mean_top1": means,
        "fp16_master_within_goal": within,
        "runs": runs,
        "flushed": reports,
        "bytes_per_parameter": rows,
    }
    tables.store(RESULTS / "precision.json", result)
    for name, text in (
        ("precision", accuracy_table(runs)),
        ("precision_flushed", flushed_table(reports)),
        ("precision_bytes", bytes_table(rows)),
    ):
        (RESULTS / f"{name}.md").write_text(f"{text}\n\n{tables.about()}\n")
        print(text, end="\n\n")


if __name__ == "__main__":
    main()
