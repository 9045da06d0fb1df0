"""Initial weights from a file: of the same model, and of a shallower one."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from largebatch.recipes.models.build import build_model
from largebatch.recipes.schema.sections import Model
from largebatch.recipes.training.folder.weights import read_weights
from largebatch.recipes.training.initial_weights import start_from
from tests.ranks import run_ranks
from tests.recipes.runs import assert_same, make, refused, train, weights
from tests.recipes.training.test_init_from_images import AIRBENCH

pytestmark = pytest.mark.slow("trains small networks, some on two ranks")

NARROW = {"channels": [8, 16, 16, 16]}


def built(name="resnet18", classes=10, *, zero=True, seed=1, **args):
    torch.manual_seed(seed)
    args = {**NARROW, "zero_init_last": zero, **args}
    return build_model(Model(name=name, args=args), classes)


def stirred(model):
    """Return the model with weights and statistics other than those of initialization."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                value.add_(torch.rand(value.shape, generator=generator), alpha=0.1)
            elif "num_batches" in name:
                value.fill_(7)
    return model


def as_file(content, path):
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    return path


def training_checkpoint(content):
    """A training checkpoint as timm's train.py writes it."""
    zeros = {name: torch.zeros_like(value) for name, value in content.items()}
    ema = {f"module.{name}": value for name, value in content.items()}
    return {"epoch": 3, "arch": "resnet18", "state_dict": zeros, "state_dict_ema": ema}


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("a.pth", dict),
        ("a.safetensors", dict),
        ("a.pth.tar", training_checkpoint),
        ("a.pth", lambda content: {"state_dict": {f"module.{k}": v for k, v in content.items()}}),
        ("a.pth", lambda content: {k: v for k, v in content.items() if "num_batches" not in k}),
    ],
)
def test_a_warm_start_takes_all_weights_from_timms_files(tmp_path, name, wrap):
    content = stirred(built()).state_dict()
    wrapped = wrap(content)
    path = as_file(wrapped, tmp_path / name)
    model = built(seed=2)
    start = start_from(str(path), model, "resnet18")
    content = wrapped if "conv1.weight" in wrapped else content
    state = model.state_dict()
    assert_same({k: state[k] for k in content}, content)
    assert start == f"weights from {path}: {len(content)} tensors copied"


def test_a_classifier_for_other_classes_keeps_its_new_weights(tmp_path):
    """Also where the file has no classifier."""
    content = stirred(built()).state_dict()
    file = as_file(content, tmp_path / "resnet18.pth")
    headless = {name: value for name, value in content.items() if not name.startswith("fc.")}
    path = as_file(headless, tmp_path / "headless.pth")
    for source, classes in ((file, 5), (path, 10)):
        model = built(classes=classes, seed=2)
        fresh = {k: v.clone() for k, v in model.state_dict().items() if k.startswith("fc.")}
        start = start_from(str(source), model, "resnet18")
        copied = f"{len(headless)} tensors copied"
        assert start == f"weights from {source}: {copied}, classifier newly initialized"
        assert_same(model.state_dict(), {**content, **fresh})


def compare(shallow, deep):
    """Check that two models are the same function, in evaluation and training."""
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(4))
    for training in (False, True, False):  # at last with the statistics of the training step
        shallow.train(training), deep.train(training)
        with torch.no_grad():
            outputs = shallow(images)
            torch.testing.assert_close(deep(images), outputs, rtol=1e-6, atol=1e-6)
    assert outputs.std() > 1e-3


@pytest.mark.parametrize(
    ("shallow", "deep", "blocks", "zero"),
    [
        # with a first block that has a downsample path, and without (resnet18's first stage)
        (("resnet18", {}), ("resnet34", {}), 8, True),
        (("resnet26", {"layers": [1, 1, 1, 1]}), ("resnet50", {"layers": [2, 1, 3, 1]}), 3, True),
        (("seresnet18", {}), ("seresnet34", {}), 8, False),
    ],
)
def test_a_deeper_model_starts_as_the_same_function(tmp_path, shallow, deep, blocks, zero):
    small = stirred(built(shallow[0], **shallow[1]))
    path = as_file(small.state_dict(), tmp_path / "small.pth")
    large = built(deep[0], seed=2, zero=zero, **deep[1])
    large.layer1[1].eval()
    before, modes = torch.get_rng_state(), [module.training for module in large.modules()]
    start = start_from(str(path), large, deep[0])
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in large.modules()] == modes
    count = len(small.state_dict())
    assert start == (
        f"weights from {path}: {count} tensors copied, {blocks} new blocks start as identity"
    )
    compare(small, large)
    # The new blocks learn: their last norm layers get gradients, and later the layers before.
    assert all(p.requires_grad for p in large.parameters())
    gammas = [p for n, p in large.named_parameters() if n.endswith(".weight") and not p.any()]
    assert len(gammas) == blocks
    large.train()(torch.randn(4, 3, 32, 32)).square().sum().backward()
    assert all(gamma.grad.any() for gamma in gammas)


SILU = {"act_layer": "silu"}  # silu(silu(x)) is not silu(x)


@pytest.mark.parametrize(
    ("ours", "theirs", "left_out", "message"),
    [
        ({"layers": [1, 2, 2, 2]}, {}, "-", "has layer1.1.conv1.weight, which is not part of X"),
        ({"name": "resnet26"}, {}, "-", "has layer1.0.conv1.weight of shape 8x64x3x3, where X "),
        ({"name": "seresnet34"}, {}, "-", "has no layer1.0.se.fc1.weight, which X needs"),
        ({"name": "resnet34"}, {}, "layer4.", "has no layer4.0.conv1.weight, which X needs"),
        ({"name": "resnet34", **SILU}, SILU, "-", "block layer1.2 would not start as the identit"),
    ],
)
def test_weights_of_another_model_are_refused_by_their_first_tensor(
    tmp_path, ours, theirs, left_out, message
):
    content = stirred(built(**theirs)).state_dict()
    content = {k: v for k, v in content.items() if not k.startswith(left_out)}
    path = as_file(content, tmp_path / "theirs.pth")
    found = refused(start_from, str(path), built(**ours), "X")
    assert found.startswith("init.from: ")
    assert message in found
    assert "; valid: " in found


class Other:
    """A class that only pickle can store."""


def cut(path):
    torch.save(built().state_dict(), path)
    path.write_bytes(path.read_bytes()[:20_000])


def flipped(path):
    torch.save(built().state_dict(), path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_safetensors(path):
    path = path.with_suffix(".safetensors")
    save_file({"a": torch.ones(9)}, path)
    path.write_bytes(path.read_bytes()[:30])
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no file or folder "),
        (b"", "cannot be read as weights: EOFError"),
        ([1, 2], "cannot be read as weights: AttributeError"),
        ({"epoch": 3, "net": {}}, "its 'epoch' is a int, not a dense tensor"),
        ({"a": Other()}, "cannot be read as weights: RuntimeError: weights_only=True blocked"),
        (Path.mkdir, "holds no weights"),
        (cut, "is damaged: its records cannot be read"),
        (flipped, "is damaged: the CRC-32 of its record "),
        (cut_safetensors, "cannot be read as weights: "),
    ],
)
def test_a_file_without_weights_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "a.pth"
    if callable(content):
        path = content(path) or path
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    found = refused(start_from, str(path), built(), "X")
    assert found.startswith("init.from: ")
    assert message in found
    assert "valid: " in found


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    """A finished run with an average, in half precision with masters."""
    folder = tmp_path_factory.mktemp("source") / "run"
    keys = ["precision=fp16-master", "loss_scale=128", "optimizer.lr=0.1", "ema.decay=0.9"]
    keys += ["evaluate_every=null", "checkpoint.every=1"]
    train(photos, folder, *keys, "stop_after=2")
    return folder


def test_a_run_starts_from_another_runs_folder_checkpoint_or_file(photos, run, tmp_path, capsys):
    def start_of(path):
        """Weights at the start, and what is printed of them."""
        capsys.readouterr()
        started = weights(make(photos, tmp_path / "run", f"init.from={path}"))
        return started, " ".join(capsys.readouterr().out.split())

    exported, average = (torch.load(run / f"weights{name}.pt") for name in ("", "_ema"))
    stopped = tmp_path / "stopped"  # before its weights were written
    shutil.copytree(run, stopped)
    (stopped / "weights.pt").unlink()
    first, newest = (stopped / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    for path in (run, run / "weights.pt", newest, stopped):
        started, output = start_of(path)
        assert_same(started, exported)
        assert f" weights from {path}: {len(exported)} tensors copied" in output
    assert_same(start_of(run / "weights_ema.pt")[0], average)
    (newest / "model.pt").write_bytes(b"")
    started, output = start_of(stopped)
    assert_same(started, read_weights(first))
    assert f"{newest} is damaged: the SHA-256 of model.pt is not that" in output
    assert "reading step-00000001 instead" in output


def test_a_run_trains_from_the_given_weights_and_a_resumed_run_does_not_read_them(
    photos, run, tmp_path
):
    path = tmp_path / "w.pt"
    shutil.copy(run / "weights.pt", path)
    keys = [f"init.from={path}", "optimizer.lr=0.1"]
    whole = train(photos, tmp_path / "whole", *keys)
    train(photos, tmp_path / "part", *keys, "stop_after=3")
    path.unlink()
    assert_same(train(photos, tmp_path / "part", *keys, "resume=true"), whole)
    assert "init.from: no file or folder " in refused(make, photos, tmp_path / "new", *keys)
    assert not (tmp_path / "new").exists()


def start_on_ranks(root, folder, run):
    """Weights from a path of a rank's own, from one with other content, and from images."""
    rank = dist.get_rank()
    path = folder / f"copy-{rank}.pt"  # a path of its own on each machine
    shutil.copy(run / "weights.pt", path)
    trained = weights(make(root, folder / "run", f"init.from={path}"))
    content = torch.load(path)
    content["fc.bias"][0] += rank
    torch.save(content, path)
    again = weights(make(root, folder / "run", f"init.from={path}"))
    return trained, again, weights(make(root, folder, *AIRBENCH))["whiten.weight"]


def test_all_ranks_have_the_weights_of_rank_0(photos, run, tmp_path):
    ranks = run_ranks(2, start_on_ranks, photos, tmp_path, run)
    for found in ranks:
        for trained in found[:2]:
            assert_same(trained, torch.load(run / "weights.pt"))
        assert torch.equal(found[2], ranks[0][2])
        assert found[2].abs().max() > 0
