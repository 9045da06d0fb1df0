"""What a run shows when it starts: a golden text, and at most 11 lines for every recipe."""

from dataclasses import replace

import torch

from largebatch.comm import Plan, Rule, Topology
from largebatch.recipes.training.screen.opening import WIDTH, show_opening
from tests.recipes.runs import BASE
from tests.recipes.training.screen.runs import SYNTHETIC, prepared


def opened(name, *keys, ranks=1, per_node=1):
    """What a run shows when it starts, and the text of each line by its label."""
    run, made, topology, said = prepared(name, *SYNTHETIC, *keys, ranks=ranks, per_node=per_node)
    show_opening(run, made, run.recipe.model_dump(), run.recipe.precision, topology)
    lines = said[0].splitlines()
    assert all(line.startswith("  ") and line[13] == " " for line in lines[1:])
    assert len(lines) <= 11
    return said[0], {line[2:14].strip(): line[14:] for line in lines[1:]}


EVERYTHING = [
    *("batch_size=4096", "micro_batch_size=4", "epochs=400", "ema.decay=0.999"),
    *("schedule.decay=100ep", "schedule.warmup_shape=quadratic", "schedule.start=0.01"),
    *("evaluate_every=0.5ep", "checkpoint.every=1ep", "stop_after=300ep", "target_accuracy=75.9"),
    *("optimizer.clip_grad_norm=1", "optimizer.bias_lr_scale=0.024", "optimizer.nesterov=true"),
    "optimizer.body_lr_scale=0.1",
    *("optimizer.args.trust_clip=true", "optimizer.decay_bias_and_norm=true"),
    *("optimizer.weight_decay=1e-4", "optimizer.args.denominator=norm-of-sum"),
    *("batch_norm.ranks=8", "channels_last=true", "compile=max-autotune"),
    *("data.eval_size=36", "data.eval_resize=40", "data.train_images=4096", "data.val_images=100"),
    *("gradient_noise_every=50", "resume=true", "run_dir=runs/all", "comm.algorithm=null"),
    "stages=["
    + ", ".join(
        f"{{from: {10 * n}ep, batch_size: {2048 * (1 + n % 3)}, lr: linear, image_size: {32 + n}}}"
        for n in range(1, 9)
    )
    + "]",
]


def test_openings(golden, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    (tmp_path / "photos").symlink_to(photos)
    shown = {}

    # Everything that a recipe can leave open was chosen, and the run goes on from a checkpoint.
    keys = [*BASE, "data.path=photos", "run_dir=runs/a", "data.backend=torchvision"]
    keys += ["data.threads=2", "data.on_error=skip", "resume=true", "batch_size=32"]
    run, made, topology, said = prepared("digits", *keys, ranks=4, per_node=2)
    auto = {"precision": "auto", "compile": "auto"}
    auto |= {"comm": {"algorithm": "auto"}, "data": {"backend": "auto"}}
    made = replace(made, plan=Plan.single("hierarchical"), changes=["data.path: another folder"])
    notices = ["optimizer.lr: scaled from 4 to 1", "a second notice"]
    opening = auto, "bf16", topology, notices
    show_opening(run, made, *opening, [])
    there = replace(made, resume_from=run.run_dir / "checkpoints" / "step-00000005")
    show_opening(replace(run, step=5), there, *opening, ["epochs: 2, was 1"])
    started = replace(made, start="weights from w.pt: 5 tensors copied")
    compiled = run.recipe.model_copy(update={"compile": "default"})
    show_opening(replace(run, recipe=compiled), started, *opening, [])
    first, nothing, second, resumed, third, weights = said
    assert second == first
    shown["all chosen by auto, on four ranks"] = first
    changed = set(third.splitlines()) - set(first.splitlines())
    shown["what runs begin with"] = "\n".join([nothing, resumed, weights, *changed])

    many = {"ranks": 64, "per_node": 8}
    keys = ["data.train_images=1281167", "data.val_images=50000", "data.classes=1000"]
    shown["ImageNet at 64k on 64 ranks"], _ = opened("resnet50-b65536", *keys, **many)

    plan = Plan(
        (*(Rule("leader", 2**n, "bf16") for n in range(10, 24)), Rule("torus", chunk_bytes=2**21)),
        segments=tuple(2**20 * n for n in range(1, 30)),
    )
    plan.save(tmp_path / "plan.json")
    keys = [*BASE, *EVERYTHING, "comm.plan=plan.json"]
    shown["everything at once"], lines = opened("digits", *keys, **many)
    long = {label for label, text in lines.items() if len(text) > WIDTH - 14}
    assert long <= {"all-reduce", "batch"}

    run, made, _, said = prepared("digits", *SYNTHETIC, *BASE, "batch_size=16", ranks=4, per_node=2)
    topology = Topology(((0, 1, 2), (3,)), source="GROUP_RANK")
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    run = replace(run, job=replace(run.job, device=torch.device("cuda", 0)))
    plan = Plan((Rule("leader", 2**20, "bf16"), Rule("torus", chunk_bytes=2**21)), 8 * 2**20)
    asked = run.recipe.model_dump()
    show_opening(run, replace(made, plan=plan), asked, "fp32", topology)
    shown["nodes of different sizes on GPUs"] = said[0]

    base = [*BASE, "epochs=90", "data.train_images=160"]
    step = "schedule={name: step, warmup: 5, power: 2.0, end: 0.0, milestones: [30ep, 60ep]}"
    for label, cases in {
        "schedule": [
            ["schedule.warmup=0"],
            ["schedule.warmup=0.1dur", "schedule.name=cosine"],
            [step],
            ["schedule={name: constant, warmup: 0, power: 2.0, end: 0.0}"],
            ["schedule.warmup=2ep", "schedule.decay=40ep", "schedule.start=0.5"],
        ],
        "optimizer": [
            ["optimizer.name=sgd"],
            ["optimizer.name=adamw", "optimizer.args={betas: [0.9, 0.95]}"],
            ["optimizer.name=lamb"],
            ["optimizer.nesterov=true", "optimizer.clip_grad_norm=2.5"],
            ["optimizer.name=muon"],
        ],
    }.items():
        texts = (opened("digits", *base, *keys)[1][label] for keys in cases)
        shown[f"lines of the {label}"] = "\n".join(texts)
    golden("opening", shown)
