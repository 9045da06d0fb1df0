"""The lines at the start of a run: at most 12 for every recipe, and what they say."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from largebatch.comm import Plan, Rule, Topology
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
from largebatch.recipes.schema.names import recipe_names
from largebatch.recipes.training import build, memory_estimate
from largebatch.recipes.training.banner import WIDTH, _steps, banner
from largebatch.recipes.training.memory_estimate import MemoryEstimate, in_words, too_large
from largebatch.recipes.training.run_dir import run_place
from largebatch.recipes.training.usage import Capacity
from tests.recipes.runs import BASE, JOB, make

MOST_LINES = 12
CPU = torch.device("cpu")
SYNTHETIC = ["data.source=synthetic", "data.path=null"]


def prepared(name, *keys, ranks=1, per_node=1):
    """The components of a run without its data, and what the banner is told beside them."""
    loaded = load(name, [*SYNTHETIC, "device=cpu", *keys])
    job, topology = Job(0, ranks, min(ranks, per_node), CPU), Topology.of(ranks, per_node)
    made = build.prepare(loaded, job, run_place(loaded, "2026-03-01_12-00-00"))
    made = replace(made, plan=build.build_plan(loaded.recipe, topology))
    return loaded.recipe, made, job, topology


def lines_of(name, *keys, ranks=1, per_node=1, memory="about 11.2 GB of tensors on each rank"):
    recipe, made, job, topology = prepared(name, *keys, ranks=ranks, per_node=per_node)
    precision = "fp32" if recipe.precision == "auto" else recipe.precision
    return banner(name, recipe, made, precision, job, topology, memory).splitlines()


def labelled(lines):
    """The text of each line by its label."""
    assert all(line.startswith("  ") and line[13] == " " for line in lines[1:])
    return {line[2:14].strip(): line[14:] for line in lines[1:]}


@pytest.mark.slow("builds each recipe")
@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_told_in_at_most_12_lines_of_100_columns(name):
    recipe = load(name).recipe
    micro = recipe.micro_batch_size or 1
    ranks = next(n for n in (64, 32, 16, 8, 4, 2, 1) if recipe.batch_size // micro % n == 0)
    keys = [] if recipe.init.images is None else ["init.images=8"]
    per_node = recipe.comm.ranks_per_node or min(8, ranks)
    lines = lines_of(name, *keys, ranks=ranks, per_node=per_node)
    assert len(lines) <= MOST_LINES
    assert [line for line in lines if len(line) > WIDTH] == []
    found = labelled(lines)
    wanted = {"data", "input", "batch", "steps", "schedule", "optimizer", "precision", "memory"}
    assert wanted | {"run folder"} <= found.keys()
    assert ("all-reduce" in found) == (ranks > 1)
    assert product(found["batch"]) == recipe.batch_size


def product(text):
    """The product in ``8,192 = 128 images x 4 accumulated x 16 ranks``, and that it is right."""
    whole, factors = text.partition(";")[0].replace(",", "").split(" = ")
    numbers = [int(factor.split()[0]) for factor in factors.split(" x ")]
    assert int(whole) == math.prod(numbers)
    return int(whole)


EVERYTHING = [
    *BASE,
    "batch_size=4096",
    "micro_batch_size=4",
    "epochs=400",
    "ema.decay=0.999",
    "schedule.decay=100ep",
    "schedule.warmup_shape=quadratic",
    "schedule.start=0.01",
    "evaluate_every=0.5ep",
    "checkpoint.every=1ep",
    "stop_after=300ep",
    "target_accuracy=75.9",
    "optimizer.clip_grad_norm=1",
    "optimizer.bias_lr_scale=0.024",
    "optimizer.nesterov=true",
    "optimizer.trust_clip=true",
    "optimizer.decay_bias_and_norm=true",
    "optimizer.weight_decay=1e-4",
    "optimizer.denominator=norm-of-sum",
    "batch_norm.over=group",
    "batch_norm.ranks=8",
    "channels_last=true",
    "compile=max-autotune",
    "data.eval_size=36",
    "data.train_images=4096",
    "data.val_images=100",
    "gradient_noise_every=50",
    "resume=true",
]
STAGES = ", ".join(
    f"{{from: {10 * n}ep, batch_size: {2048 * (1 + n % 3)}, lr: linear, image_size: {32 + n}}}"
    for n in range(1, 9)
)


def test_everything_at_once_is_folded_into_12_lines(tmp_path):
    rules = (*(Rule("leader", 2**n) for n in range(10, 24)), Rule("torus", chunk_bytes=2**21))
    Plan(rules, segments=tuple(2**20 * n for n in range(1, 30))).save(tmp_path / "plan.json")
    keys = [f"comm.plan={tmp_path}/plan.json", "comm.algorithm=null", f"stages=[{STAGES}]"]
    keys += [f"run_dir={tmp_path}/run", "data.eval_resize=40"]
    lines = lines_of("digits", *EVERYTHING, *keys, ranks=64, per_node=8)
    assert len(lines) == MOST_LINES
    found = labelled(lines)
    assert "average of the weights 0.999" in lines[0]
    assert found["stages"].startswith("33 pixels, batch 4,096 from 10ep, learning rate scaled (")
    assert found["stages"].endswith("; and 7 more")
    assert found["all-reduce"].startswith("leader to 1 KiB, leader to 2 KiB, ")
    assert ", and 12 more; buckets of 1 MiB, and 28 more; " in found["all-reduce"]
    assert f"; {tmp_path}/plan.json" in found["all-reduce"]
    assert found["data"] == (
        "4,096 training images, 100 for validation, 1,000 classes, 32 pixels, validation at 36"
    )
    assert found["steps"] == (
        "305 in 400 epochs, stopping after 239, until 75.9 % top-1, and 3 more"
    )
    assert found["optimizer"] == ("lars, momentum 0.9, weight decay 0.0001 on all, and 7 more")
    long = {label for label, text in found.items() if len(text) > WIDTH - 14}
    assert long <= {"all-reduce", "batch", "run folder"}


@pytest.mark.parametrize("name", ["digits", "resnet50-b65536", "resnet50-muon-b65536"])
def test_the_steps_fit_with_an_early_stop_and_a_target(name):
    keys = ["stop_after=0.5dur", "target_accuracy=75.9", "checkpoint.every=1ep"]
    keys += ["evaluate_every=0.5ep", "data.val_images=100"]
    keys += [] if load(name).recipe.init.images is None else ["init.images=8"]
    recipe, made, *_ = prepared(name, *keys)
    text = _steps(recipe, made)
    assert len(text) <= WIDTH - 14
    last, total = made.last_step, made.timeline.total_steps
    place = f"{total:,} in {recipe.epochs:g} epochs, stopping after {last:,}, until 75.9 % top-1, "
    assert text.startswith(place)


def test_what_muon_leaves_to_another_rule_does_not_hide_momentum_and_weight_decay():
    text = labelled(lines_of("resnet50-muon-b65536"))["optimizer"]
    assert text == (
        "muon, momentum 0.6, weight decay 0.0001, sgd on 8.3 % of the parameters, and 5 more"
    )


def test_a_banner_at_a_glance():
    keys = ["data.train_images=1281167", "data.val_images=50000", "data.classes=1000"]
    lines = lines_of("resnet50-b65536", *keys, ranks=64, per_node=8)
    assert lines[0] == "resnet50-b65536: resnet50, 25.6 M parameters, seed 0"
    threads = "1 thread" if torch.get_num_threads() == 1 else f"{torch.get_num_threads()} threads"
    assert labelled(lines) == {
        "data": "1,281,167 training images, 50,000 for validation, 1,000 classes, 224 pixels",
        "input": "synthetic images",
        "batch": "65,536 = 128 images x 8 accumulated x 64 ranks on 8 nodes of 8; "
        "batch norm over 128",
        "steps": "1,740 in 89 epochs, until 75.9 % top-1, evaluation every 4ep, and 2 more",
        "schedule": "linear warm-up to 24.699 in 31 epochs, power-2 decay to 0.0001 at the end",
        "optimizer": "lars, momentum 0.951807, weight decay 0.0001, trust coefficient 0.001, "
        "dialect mlperf",
        "precision": f"bf16 on cpu with {threads}",
        "all-reduce": "ring; buckets of 25 MiB",
        "memory": "about 11.2 GB of tensors on each rank",
        "run folder": "runs/resnet50-b65536/2026-03-01_12-00-00",
    }


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["schedule.warmup=0"], "1 from the start, power-2 decay to 0.0001 at the end"),
        (
            ["schedule.warmup=0.1dur", "schedule.name=cosine", "schedule.power=2"],
            "linear warm-up to 1 in 10 % of the run, cosine decay to 0.0001 at the end",
        ),
        (
            ["schedule={name: step, warmup: 5, milestones: [30ep, 60ep], factor: 0.2}"],
            "linear warm-up to 1 in 5 steps, times 0.2 at epoch 30, 60",
        ),
        (["schedule={name: constant, warmup: 0}"], "1 from the start, then constant"),
        (
            ["schedule.warmup=2ep", "schedule.decay=40ep", "schedule.start=0.5"],
            "linear warm-up from 0.5 to 1 in 2 epochs, power-2 decay to 0.0001 at epoch 42",
        ),
    ],
)
def test_schedules_in_words(keys, words):
    if "schedule={" in keys[0]:
        keys = ["schedule.power=2", "schedule.end=0", *keys]
    base = [*BASE, "epochs=90", "data.train_images=160", "schedule.warmup=0"]
    if keys[-1].startswith("schedule={"):
        keys = [keys[-1].replace("{", "{power: 2.0, end: 0.0, ")]
    assert labelled(lines_of("digits", *base, *keys))["schedule"] == words


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["optimizer.name=sgd"], "sgd, momentum 0.9, weight decay 0.0001"),
        (["optimizer.name=adamw", "optimizer.args={betas: [0.9, 0.95]}"],
         "adamw, weight decay 0.0001, betas [0.9, 0.95]"),
        (["optimizer.name=lamb"], "lamb (timm.optim.Lamb), weight decay 0.0001"),
        (["optimizer.nesterov=true", "optimizer.clip_grad_norm=2.5"],
         "lars, momentum 0.9, weight decay 0.0001, gradients clipped at norm 2.5, and 3 more"),
    ],
)  # fmt: skip
def test_optimizers_in_words(keys, words):
    assert labelled(lines_of("digits", *BASE, *keys))["optimizer"] == words


def test_nodes_of_different_sizes_and_the_rules_of_a_plan():
    recipe, made, job, _ = prepared("digits", *BASE, "batch_size=16", ranks=4, per_node=2)
    topology = Topology(((0, 1, 2), (3,)), source="GROUP_RANK")
    plan = Plan((Rule("leader", 2**20, "bf16"), Rule("torus", chunk_bytes=2**21)), 8 * 2**20)
    text = banner("digits", recipe, replace(made, plan=plan), "fp32", job, topology)
    found = labelled(text.splitlines())
    assert found["batch"].startswith("16 = 4 images x 4 ranks on nodes of 3 + 1")
    assert found["all-reduce"] == (
        "leader in bf16 to 1 MiB, torus in chunks of 2 MiB above; buckets of 8 MiB; nodes by "
        "GROUP_RANK"
    )
    assert "memory" not in found


# --- the memory of a step -----------------------------------------------------------------------


def estimate(name="digits", *keys, ranks=1, per_node=1):
    recipe, made, job, _ = prepared(name, *keys, ranks=ranks, per_node=per_node)
    return MemoryEstimate(recipe, made, job)


def test_the_estimate_is_the_count_of_the_plan():
    """The copy of a model that exists counts as the one that ``largebatch plan`` builds."""
    from largebatch.recipes.training.memory import MemoryCounter

    for keys in ([], ["batch_norm.over=ghost", "batch_norm.images=2"]):
        keys = [*BASE, *keys, "ema.decay=0.9"]
        recipe, made, job, _ = prepared("digits", *keys, ranks=2, per_node=2)
        found = MemoryEstimate(recipe, made, job).count("bf16-master")
        again = MemoryCounter(recipe, 10 if recipe.data.classes == 10 else recipe.data.classes)
        assert found == again.count("bf16-master", 4, 32, ranks=2, accumulation=2)
        numbers = [p for p in made.model.parameters() if not p.is_meta]
        assert len(numbers) == len([*made.model.parameters()])  # the run's own model is untouched


def test_the_stage_with_the_most_pixels_is_counted():
    stages = "stages=[{from: 1ep, image_size: 48}, {from: 2ep, image_size: 16}]"
    keys = [*BASE, "epochs=3", "data.train_images=64", "data.eval_resize=48"]
    with_stages, plain = estimate("digits", *keys, stages), estimate("digits", *keys)
    most, least = with_stages.count("fp32"), plain.count("fp32")
    # Maps of the network grow like pixels, its pooled features and the labels do not.
    assert most.activations > 2.2 * least.activations


class ReadsInForward(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.fc = nn.Linear(3, num_classes)

    def forward(self, x):
        print("forward")
        return self.fc(x.mean((2, 3))) * float(x.max().item())


class CannotBeCopied(ReadsInForward):
    def __deepcopy__(self, memo):
        raise RuntimeError("no copies")


@pytest.mark.parametrize("name", ["ReadsInForward", "CannotBeCopied"])
def test_a_model_that_cannot_be_counted_has_no_estimate_and_the_run_goes_on(
    name, photos, tmp_path, monkeypatch, capfd
):
    monkeypatch.setitem(sys.modules, "models_of_a_test", sys.modules[__name__])
    keys = [f"model.name=models_of_a_test:{name}", "model.zero_init_last_norm=false"]
    trainer = make(photos, tmp_path / "run", *keys, "stop_after=1", "optimizer.lr=0.1")
    output = capfd.readouterr()
    assert "  precision   fp32 on cpu" in output.out
    assert "memory" not in output.out
    assert "forward" not in output.out
    assert output.err == ""
    assert trainer.run()["step"] == 1


def test_a_run_says_what_it_needs_and_a_quiet_one_does_not_count(photos, tmp_path, capsys):
    make(photos, tmp_path / "run")
    assert "\n  memory      about " in capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_estimate.MemoryEstimate, "count", lambda *_: 1 / 0)
        from largebatch.recipes.training.trainer import Trainer

        keys = [*BASE, f"data.path={photos}", f"run_dir={tmp_path}/quiet"]
        Trainer.of(load("digits", keys), JOB, quiet=True)


def test_a_step_larger_than_the_gpu_is_warned_of_in_one_line(photos, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: 1 / 0)  # there is none
    found = estimate("digits", *BASE).count("fp32")
    small, large = Capacity("NVIDIA Tiny", found.peak - 1), Capacity("NVIDIA Huge", found.peak)
    assert too_large(found, large) is too_large(None, small) is too_large(found, None) is None
    line = too_large(found, small)
    assert line.startswith("micro_batch_size: 4 images need about ")
    assert "; valid: fewer images" in line
    megabytes = f"{found.peak / 1e6:.0f} MB"
    assert in_words(found, None) == f"about {megabytes} of tensors on each rank"
    assert in_words(found, large).endswith(f", of {megabytes} on the NVIDIA Huge")
    tiny = Capacity("NVIDIA Tiny", 1_000_000)
    monkeypatch.setattr(memory_estimate, "capacity_of", lambda device: tiny)
    make(photos, tmp_path / "run")
    output, warning = capsys.readouterr()
    assert warning.startswith("largebatch: warning: micro_batch_size: 4 images need about ")
    assert ", and NVIDIA Tiny has 1 MB; valid: fewer images" in warning
    assert warning.count("\n") == 1
    assert " of tensors on each rank, of 1 MB on the NVIDIA Tiny\n" in output
