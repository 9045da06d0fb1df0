"""The settings of a device: decided by recipe and device, and set for a run."""

import pytest
import torch

from largebatch.recipes.schema.load import load
from largebatch.recipes.training import build, run
from largebatch.recipes.training.device import DeviceSettings, device_settings
from tests.recipes.runs import assert_same, largest_difference, make, train, weights

CUDA, CPU = torch.device("cuda", 1), torch.device("cpu")
BACKENDS = torch.backends


def settings(device, *overrides):
    return device_settings(load("digits", overrides).recipe, device)


TRUE = ("channels_last=true", "cudnn_benchmark=true", "tf32=true")
FALSE = tuple(key.replace("true", "false") for key in TRUE)
ON = "channels-last memory format, cuDNN benchmark on, TF32 on"
OFF = "contiguous memory format, cuDNN benchmark off, TF32 off"


@pytest.mark.parametrize(
    ("device", "keys", "found", "words"),
    [
        (CUDA, (), (True, True, True), ON),
        (CUDA, ["tf32=false"], (True, True, False), ON[:-2] + "off"),
        (CUDA, FALSE, (False, False, False), OFF),
        (CPU, (), (False, None, None), ""),
        (CPU, TRUE, (True, None, None), "channels-last memory format"),
    ],
    ids=str,
)
def test_settings_follow_keys_and_device(device, keys, found, words):
    ours = settings(device, *keys)
    assert (ours, ours.in_words()) == (DeviceSettings(*found), words)


@pytest.fixture
def flags_of_before():
    """Put back what the settings of a run touch: they hold in the whole process."""
    conv, rnn = BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn
    before = conv.fp32_precision, rnn.fp32_precision
    yield
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32, BACKENDS.cudnn.benchmark = True, False
    BACKENDS.cuda.matmul.fp32_precision = BACKENDS.mkldnn.matmul.fp32_precision = "none"
    conv.fp32_precision, rnn.fp32_precision = before


def of_torch_1():
    torch.set_float32_matmul_precision("medium")
    BACKENDS.cudnn.allow_tf32 = False


def of_torch_2():
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    BACKENDS.cudnn.conv.fp32_precision = "ieee"


@pytest.mark.parametrize("caller", [of_torch_1, of_torch_2])
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.usefixtures("flags_of_before")
def test_flags_are_set_whatever_the_caller_has_set(caller, on):
    caller()
    DeviceSettings(False, on, on).apply()
    DeviceSettings(True, None, None).apply()  # which changes nothing
    assert BACKENDS.cudnn.benchmark is on
    operators = BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn
    assert {one.fp32_precision for one in operators} == {"tf32" if on else "ieee"}
    # The old flags can be read, as torch.compile does, and agree.
    assert torch.get_float32_matmul_precision() == ("high" if on else "highest")
    assert BACKENDS.cuda.matmul.allow_tf32 is BACKENDS.cudnn.allow_tf32 is on


@pytest.mark.usefixtures("flags_of_before")
def test_a_run_has_the_flags_of_its_settings(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "device_settings", lambda *_: settings(CUDA))  # without a GPU
    make(photos, tmp_path)
    assert BACKENDS.cudnn.benchmark is True
    assert BACKENDS.cudnn.conv.fp32_precision == BACKENDS.cuda.matmul.fp32_precision == "tf32"


def test_auto_precision_is_the_machines_or_that_of_the_checkpoint(photos, tmp_path, monkeypatch):
    keys = ["precision=auto", "evaluate_every=null", "track=[]", "checkpoint.every=1"]
    for first, other in (("bf16", "fp32"), ("fp32", "bf16")):
        monkeypatch.setattr(run, "auto_precision", lambda device, name=first: name)
        train(photos, tmp_path / first, *keys, "stop_after=1")
        monkeypatch.setattr(run, "auto_precision", lambda device, name=other: name)
        trainer = make(photos, tmp_path / first, *keys, "resume=true", "stop_after=2")
        # As its recipe.yaml will say.
        assert trainer.precision.name == trainer.context.recipe.precision == first


@pytest.mark.slow("trains four times")
def test_weights_do_not_depend_on_the_memory_format(photos, tmp_path):
    """Checkpoints, exported weights and their average serve runs in the other format."""
    keys = ["evaluate_every=null", "track=[]", "ema.decay=0.5", "optimizer.lr=0.1"]
    last, plain = "channels_last=true", "channels_last=false"
    trainer = make(photos, tmp_path / "last", *keys, last, "stop_after=2")
    convolution = next(p for p in trainer.model.parameters() if p.ndim == 4)
    assert convolution.is_contiguous(memory_format=torch.channels_last)
    start = weights(trainer)
    trainer.run()
    train(photos, tmp_path / "plain", *keys, plain, "stop_after=2")
    for name in ("weights_ema.pt", "weights.pt"):
        ours, theirs = (torch.load(tmp_path / run / name) for run in ("last", "plain"))
        assert all(value.is_contiguous() for value in ours.values())
        assert largest_difference(ours, theirs) < 1e-3 * largest_difference(ours, start)
    # Training continues from the checkpoint in either format, and starts from exported weights.
    ends = []
    for key in (last, plain):
        fresh = make(photos, tmp_path / f"init-{key}", key, f"init.from={tmp_path}/last/weights.pt")
        assert_same(weights(fresh), ours)
        more = f"resume={tmp_path}/last/checkpoints/step-00000002", "stop_after=3"
        ends.append(train(photos, tmp_path / key, *keys, key, *more))
    assert largest_difference(*ends) < 1e-3 * largest_difference(ends[0], start)
