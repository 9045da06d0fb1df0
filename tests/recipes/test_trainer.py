"""The trainer: accumulation, ranks, resume, evaluation, and what a run leaves behind."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.job import Job
from largebatch.recipes.load import load
from largebatch.recipes.metrics import read_metrics
from largebatch.recipes.trainer import Trainer
from tests.ranks import run_ranks

# A small network on the photos of conftest: 53 images to train on, 23 to evaluate.
BASE = [
    "model.name=test_resnet",
    "data.image_size=32",
    "data.eval_resize=36",
    "batch_size=16",
    "micro_batch_size=4",
    "epochs=2",
    "optimizer.lr=1",
    "schedule.warmup=1ep",
    "precision=fp32",
    "device=cpu",
    "comm.ranks_per_node=null",
    "log_every=2",
    "evaluate_every=1ep",
    "checkpoint.every=null",
]
NO_BATCH_NORM = ["model.name=test_vit", "model.args.img_size=32", "model.zero_init_last_norm=false"]


@pytest.fixture(autouse=True)
def _no_pictures(request, monkeypatch):
    """Drawing takes longer than training here."""
    if "pictures" not in request.keywords:
        monkeypatch.setattr(
            "largebatch.recipes.trainer.write_report", lambda run_dir, title: run_dir
        )


def make(root, run_dir, *overrides):
    here = [f"data.path={root}", f"run_dir={run_dir}"]
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    job = Job(rank, world_size, world_size, torch.device("cpu"))
    return Trainer(load("digits", [*BASE, *here, *overrides]), job)


def weights(trainer):
    return {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}


def train(root, run_dir, *overrides):
    """Train, and give the weights as they are at the end."""
    trainer = make(root, run_dir, *overrides)
    trainer.run()
    return weights(trainer)


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [k for k in ours if not torch.equal(ours[k], theirs[k])] == []


def largest_difference(ours, theirs):
    return max(
        ((ours[k].float() - theirs[k].float()).abs().max() / (theirs[k].float().abs().max() + 1e-3))
        for k in ours
    ).item()


def test_accumulated_micro_batches_make_the_update_of_one_large_batch(photos, tmp_path):
    whole = train(photos, tmp_path / "a", *NO_BATCH_NORM, "micro_batch_size=16")
    pieces = train(photos, tmp_path / "b", *NO_BATCH_NORM, "micro_batch_size=2")
    start = weights(make(photos, tmp_path / "c", *NO_BATCH_NORM))
    assert largest_difference(pieces, whole) < 1e-4 * largest_difference(whole, start)


def same_on_all_ranks(root, run_dir, *overrides):
    trained = train(root, run_dir, *overrides)
    for name, value in trained.items():
        first = value.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, value), name
    return trained


@pytest.fixture(scope="module")
def alone(photos, tmp_path_factory):
    """Weights before and after training on one process."""
    folder = tmp_path_factory.mktemp("alone")
    return weights(make(photos, folder / "start")), train(photos, folder / "run")


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("comm", [["comm.algorithm=ring"], ["comm.ranks_per_node=2"]])
def test_any_number_of_ranks_makes_the_same_updates(photos, alone, tmp_path, world_size, comm):
    """Batch norm included: with one micro-batch size its statistics are of the same images."""
    start, alone = alone
    trained = run_ranks(world_size, same_on_all_ranks, photos, tmp_path / "ranks", *comm)
    parameters = [k for k in alone if "running" not in k and "tracked" not in k]
    for rank in trained:
        difference = largest_difference(
            {k: rank[k] for k in parameters}, {k: alone[k] for k in parameters}
        )
        assert difference < 2e-3 * largest_difference(alone, start)


@pytest.mark.parametrize(
    ("precision", "optimizer", "dialect"),
    [
        *((precision, "lars", "mlperf") for precision in ("fp32", "bf16", "fp16")),
        ("fp16", "lars", "mlperf-corrected"),  # it goes by the learning rate before
        ("fp32", "sgd", "mlperf"),
    ],
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(
    photos, tmp_path, precision, optimizer, dialect
):
    options = (
        f"precision={precision}",
        f"optimizer.name={optimizer}",
        f"optimizer.dialect={dialect}",
        "optimizer.lr=0.1",
        "model.args.drop_rate=0.5",  # dropout: random numbers that resume must get again
        "checkpoint.every=1",
        "checkpoint.keep=99",
    )
    whole = train(photos, tmp_path / "whole", *options)
    for step in (1, 4):  # in the first epoch, and in the second after an evaluation
        checkpoint = tmp_path / "whole" / "checkpoints" / f"step-{step:08d}"
        resumed = train(photos, tmp_path / f"resumed-{step}", *options, f"resume={checkpoint}")
        assert_same(resumed, whole)
    expected = [line for line in read_metrics(tmp_path / "whole") if line["step"] > 4]
    actual = read_metrics(tmp_path / "resumed-4")
    assert [timeless(line) for line in actual] == [timeless(line) for line in expected]


def timeless(line):
    return {k: v for k, v in line.items() if "second" not in k}


def test_trust_ratios_are_written_when_asked(photos, tmp_path):
    trainer = make(photos, tmp_path / "with", "trust_ratios_every=3")
    trainer.run()
    lines = [x for x in read_metrics(tmp_path / "with") if x["split"] == "trust_ratio"]
    assert [line["step"] for line in lines] == [3, 6, 7]
    adapting = {
        name for g in trainer.optimizer.param_groups if g["adapt"] for name in g["param_names"]
    }
    last = trainer.optimizer.trust_ratios()
    for line in lines:
        assert line.keys() == {"split", "step", "epoch"} | adapting
        for name in adapting:
            least, median, most = line[name]
            assert 0 < least <= median <= most
    assert all(lines[-1][name] == [pytest.approx(last[name])] * 3 for name in adapting)
    train(photos, tmp_path / "without")
    assert all(line["split"] != "trust_ratio" for line in read_metrics(tmp_path / "without"))
    with pytest.raises(RecipeError, match=r"trust_ratios_every: sgd has none; valid: null"):
        make(photos, tmp_path / "sgd", "optimizer.name=sgd", "trust_ratios_every=3")


def resume_on_ranks(root, folder, *comm):
    batch = 4 * dist.get_world_size()
    options = ("checkpoint.every=1", "checkpoint.keep=99", f"batch_size={batch}", *comm)
    whole = train(root, folder / "whole", *options)
    checkpoint = folder / "whole" / "checkpoints" / "step-00000003"
    resumed = train(root, folder / "resumed", *options, f"resume={checkpoint}")
    assert_same(resumed, whole)
    return whole


@pytest.mark.parametrize(
    ("world_size", "comm"),
    [(2, []), (3, ["comm.algorithm=ring"]), (3, ["comm.ranks_per_node=1"])],
)
def test_a_resumed_run_on_ranks_is_the_run_that_was_never_stopped(
    photos, tmp_path, world_size, comm
):
    """Each rank gets back its own batch norm statistics, and sums of three are taken in order."""
    run_ranks(world_size, resume_on_ranks, photos, tmp_path, *comm)


def test_an_evaluation_leaves_no_trace_in_training(photos, tmp_path):
    """One that is due only because a run stops must not part it from the run that went on."""
    for trained in run_ranks(2, stop_and_go_on, photos, tmp_path):
        assert_same(*trained)


def stop_and_go_on(root, folder):
    whole = train(root, folder / "whole")
    train(root, folder / "part", "stop_after=2")
    return train(root, folder / "part", "resume=true"), whole


def run_with_other_data(root, other, run_dir):
    with pytest.raises(RecipeError, match=r"training images is .* on rank 0, .* rank 1"):
        make(other if dist.get_rank() else root, run_dir)
    with pytest.raises(RecipeError, match=r"the recipe's epochs is 2.0 on rank 0, 3.0 on"):
        make(root, run_dir, f"epochs={2 + dist.get_rank()}")


def test_ranks_that_would_not_run_the_same_are_refused(photos, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(photos, other)
    next((other / "train" / "ant").iterdir()).unlink()
    run_ranks(2, run_with_other_data, photos, other, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_with_nothing_left_to_train_nothing_is_written(photos, tmp_path):
    train(photos, tmp_path / "whole")
    checkpoint = next((tmp_path / "whole" / "checkpoints").iterdir())
    with pytest.raises(RecipeError, match=r"nothing is left to train: .* is at step 7, .* 7"):
        make(photos, tmp_path / "new", f"resume={checkpoint}")
    assert not (tmp_path / "new").exists()
    assert make(photos, tmp_path / "whole", "resume=true").run()["step"] == 7


def test_a_run_folder_that_cannot_be_made_is_told(photos, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"run_dir: .* cannot be made: Not a directory"):
        train(photos, tmp_path / "file" / "run")


def test_an_error_takes_the_progress_bar_away(photos, tmp_path, monkeypatch):
    stopped = []
    trainer = make(photos, tmp_path)
    monkeypatch.setattr(trainer.display, "stop", lambda: stopped.append(True))
    monkeypatch.setattr(trainer, "_update", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert stopped


def resume_expecting_refusal(root, run_dir):
    with pytest.raises(RecipeError, match=r"world_size 1, now it is 2; resume.reshard=true"):
        make(root, run_dir, "resume=true")
    return train(root, run_dir, "resume=true", "resume.reshard=true")


def test_another_number_of_ranks_is_refused_or_resharded(photos, alone, tmp_path):
    start, whole = alone
    train(photos, tmp_path / "part", "stop_after=3")
    for trained in run_ranks(2, resume_expecting_refusal, photos, tmp_path / "part"):
        assert largest_difference(trained, whole) < 2e-3 * largest_difference(whole, start)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.args.drop_rate=0.5", "made with model.args={}, now it is {'drop_rate': 0.5}"),
        ("optimizer.dialect=torch", "made with optimizer.dialect=mlperf, now it is torch"),
        ("seed=1", "the input was saved with seed 0, now it is 1"),
        ("batch_size=8", "made with batch_size=16, now it is 8"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(photos, tmp_path, override, message):
    train(photos, tmp_path, "stop_after=2")
    with pytest.raises(RecipeError) as error:
        make(photos, tmp_path, "resume=true", override)
    assert message in str(error.value)


def test_options_may_change_on_resume_and_the_change_is_told(photos, tmp_path, capsys):
    train(photos, tmp_path, "stop_after=2")
    capsys.readouterr()
    options = ("optimizer.momentum=0.5", "precision=fp16", "epochs=3")
    resumed = make(photos, tmp_path, "resume=true", *options)
    told = capsys.readouterr().out
    assert "optimizer.momentum is now 0.5, was 0.9" in told
    assert 'precision is now "fp16", was "fp32"' in told
    assert {group["momentum"] for group in resumed.optimizer.param_groups} == {0.5}
    assert resumed.run()["step"] == round(3 * 53 / 16)


def test_stopping_early_keeps_the_schedule_of_the_whole_run(photos, tmp_path):
    train(photos, tmp_path / "whole")
    train(photos, tmp_path / "part", "stop_after=3")
    rates = {line["step"]: line["lr"] for line in read_metrics(tmp_path / "whole") if "lr" in line}
    part = [line for line in read_metrics(tmp_path / "part") if "lr" in line]
    assert [line["step"] for line in part] == [2, 3]
    assert part[0]["lr"] == rates[2]
    summary = json.loads((tmp_path / "part" / "summary.json").read_text())
    assert (summary["step"], summary["total_steps"]) == (3, 7)


def test_a_signal_stops_with_a_checkpoint_that_goes_on_bit_for_bit(photos, tmp_path):
    whole = train(photos, tmp_path / "whole", "epochs=8", "log_every=1")
    stopped = make(photos, tmp_path / "run", "epochs=8", "log_every=1")
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    original = stopped._update

    def update(*arguments):
        original(*arguments)
        if stopped.step == 4:
            timer.run()

    stopped._update = update
    with pytest.raises(SystemExit) as exit_:
        stopped.run()
    assert exit_.value.code == 128 + signal.SIGTERM
    resumed = make(photos, tmp_path / "run", "epochs=8", "log_every=1", "resume=true")
    assert 0 < resumed.step < resumed.last_step
    resumed.run()
    assert_same(weights(resumed), whole)
    lines = read_metrics(tmp_path / "run")
    assert [timeless(line) for line in lines] == [
        timeless(line) for line in read_metrics(tmp_path / "whole")
    ]


def test_a_checkpoint_is_whole_or_not_there(photos, tmp_path, monkeypatch):
    trainer = make(photos, tmp_path, "checkpoint.every=2")

    rename = Path.rename

    def crash(path, target):
        if path.name == ".step-00000002.partial":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    found = list((tmp_path / "checkpoints").glob("step-*"))
    assert found == []
    assert list((tmp_path / "checkpoints").glob(".step-00000002.partial/*.distcp"))
    # resume=true finds nothing whole and starts anew; the left-over does not stand in its way
    again = make(photos, tmp_path, "checkpoint.every=2", "resume=true")
    assert again.step == 0
    again.run()
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert steps == ["step-00000006", "step-00000007"]  # the newest two


@pytest.mark.pictures
def test_what_a_run_leaves_behind(photos, tmp_path):
    trained = train(photos, tmp_path / "run")
    run_dir = tmp_path / "run"
    assert {path.name for path in run_dir.iterdir()} == {
        "checkpoints",
        "metrics.jsonl",
        "recipe.yaml",
        "report.png",
        "summary.json",
        "tensorboard",
        "weights.pt",
    }
    lines = read_metrics(run_dir)
    assert [(line["split"], line["step"]) for line in lines] == [
        ("train", 2),
        ("train", 4),
        ("val", 4),
        ("train", 6),
        ("train", 7),
        ("val", 7),
    ]
    for line in lines:
        wanted = {"split", "step", "epoch", "loss", "top1", "top5", "seconds"}
        if line["split"] == "train":
            wanted |= {"lr", "images_per_second", "wait_seconds"}
        assert set(line) == wanted
        assert 0 <= line["top1"] <= line["top5"] <= 100
        assert line["epoch"] == pytest.approx(16 * line["step"] / 53, abs=1e-3)
    assert_same(torch.load(run_dir / "weights.pt"), trained)
    assert load(str(run_dir / "recipe.yaml")).recipe.batch_size == 16
    assert any((run_dir / "tensorboard").iterdir())
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["top1"] == lines[-1]["top1"]
    assert summary["versions"]["torch"] == torch.__version__.partition("+")[0]


def evaluate_unevenly(root, run_dir):
    trainer = make(root, run_dir, "epochs=1", "micro_batch_size=4", "batch_size=12")
    trainer.run()
    return read_metrics(run_dir)[-1]["top1"]


def test_evaluation_over_ranks_is_that_of_plain_code(photos, tmp_path):
    """23 images on 3 ranks, in batches of 4: each counted once."""
    import timm
    from PIL import Image
    from torchvision.transforms import v2

    from largebatch.pipeline import IMAGENET_MEAN, IMAGENET_STD, ImageFolder

    top1 = run_ranks(3, evaluate_unevenly, photos, tmp_path)[0]
    model = timm.create_model("test_resnet", num_classes=3)
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))
    model.eval()
    prepare = v2.Compose(
        [
            v2.Resize(36),
            v2.CenterCrop(32),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )
    source = ImageFolder(photos, "val")
    images = [prepare(Image.open(source.path(i)).convert("RGB")) for i in range(len(source))]
    with torch.no_grad():
        hits = model(torch.stack(images)).argmax(1) == torch.from_numpy(source.labels)
    assert top1 == pytest.approx(100 * hits.float().mean().item())


@pytest.mark.parametrize("step", [1, 2])  # between readings of the meters, and at one
def test_training_stops_when_the_target_is_reached(photos, tmp_path, step):
    trainer = make(photos, tmp_path, "epochs=50", "target_accuracy=1", f"evaluate_every={step}")
    trainer.run()
    assert trainer.step == step
    assert {line["split"] for line in read_metrics(tmp_path)} == {"train", "val"}
    assert (tmp_path / "checkpoints" / f"step-{step:08d}").is_dir()


def test_the_flagship_takes_two_steps_by_overrides_only(tmp_path):
    overrides = [
        "batch_size=64",
        "micro_batch_size=8",
        "data.source=synthetic",
        "data.image_size=32",
        "data.eval_resize=32",
        "device=cpu",
        "stop_after=2",
        f"run_dir={tmp_path}",
    ]
    job = Job(0, 1, 1, torch.device("cpu"))
    trainer = Trainer(load("resnet50-b65536", overrides), job)
    before = weights(trainer)
    assert (trainer.accumulation, trainer.precision.name) == (8, "bf16")
    summary = trainer.run()
    after = weights(trainer)
    assert summary["step"] == 2
    # The first step is at learning rate 0, as in MLPerf; the second moves every tensor.
    still = [n for n, p in trainer.model.named_parameters() if torch.equal(before[n], after[n])]
    # ... except where a zero gamma, at the end of a block, keeps gradients from what is before it
    blocked = {n for n in still if ".conv" in n or ".bn1." in n or ".bn2." in n or ".bn3.w" in n}
    assert set(still) <= blocked
    assert summary["train_loss"] == pytest.approx(6.9, abs=0.5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.path=nowhere"], "data.path: no folder nowhere; it must hold train/<class>/"),
        (["epochs=0.1"], "epochs: 0.1 are less than one batch"),
        (["schedule.warmup=3ep"], r"warmup: 3ep \(10 steps\) is longer than the run, 2 epochs"),
        (["comm.algorithm=null", "comm.plan=no.json"], "plan no.json: No such file"),
        (["resume=no/such"], "resume.from: no/such is not a checkpoint"),
        (["data.backend=dali-gpu"], "dali-gpu needs a CUDA device"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    photos, tmp_path, overrides, message
):
    with pytest.raises(RecipeError, match=message):
        make(photos, tmp_path / "run", *overrides)
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_overwritten(photos, tmp_path):
    train(photos, tmp_path, "stop_after=2")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(RecipeError, match=r"already holds a run; resume=true goes on with it"):
        make(photos, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def batch_that_does_not_divide(root, run_dir):
    with pytest.raises(RecipeError) as error:
        make(root, run_dir)
    return str(error.value)


def test_a_batch_that_does_not_divide_over_the_ranks_is_refused_on_all(photos, tmp_path):
    messages = run_ranks(3, batch_that_does_not_divide, photos, tmp_path)
    assert len(set(messages)) == 1
    assert "batch_size: 16 does not divide into micro-batches of 4 on 3 ranks" in messages[0]
    assert "valid: a multiple of 12, such as 12" in messages[0]


def one_rank_without_data(root, run_dir):
    with pytest.raises(RecipeError) as error:
        make(root if dist.get_rank() == 0 else "nowhere", run_dir)
    return str(error.value)


def test_what_is_wrong_on_one_rank_is_told_on_all(photos, tmp_path):
    messages = run_ranks(2, one_rank_without_data, photos, tmp_path)
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 1: data.path: no folder nowhere")
