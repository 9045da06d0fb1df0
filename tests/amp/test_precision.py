"""Precision: the dtypes of each precision, in the three calls that a training loop makes."""

import pytest
import torch

from largebatch.amp import OPT_LEVELS, PRECISIONS, Precision, auto_precision
from tests.amp.nets import MASTERS, lars, loss_of, net_and_batch, sgd

EXPECTED = {  # name: (matrix products, parameters and gradients, norm layers, masters)
    "fp32": (torch.float32, torch.float32, torch.float32, False),
    "bf16": (torch.bfloat16, torch.float32, torch.float32, False),
    "fp16": (torch.float16, torch.float32, torch.float32, False),
    "bf16-master": (torch.bfloat16, torch.bfloat16, torch.float32, True),
    "fp16-master": (torch.float16, torch.float16, torch.float32, True),
    "fp16-pure": (torch.float16, torch.float16, torch.float32, False),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_each_precision_computes_and_stores_in_the_dtypes_of_the_table(name):
    compute, stored, norms, masters = EXPECTED[name]
    precision = Precision(name)
    model, x, labels = net_and_batch()
    model = precision.convert(model)
    optimizer = lars(model, masters=masters)
    seen = {}
    model.conv2.register_forward_hook(lambda *call: seen.update(conv=call[-1].dtype))
    model.fc.register_forward_hook(lambda *call: seen.update(fc=call[-1].dtype))
    precision.backward(loss_of(precision, model, x, labels))
    assert seen == {"conv": compute, "fc": compute}
    for own, parameter in model.named_parameters():
        dtype = norms if "bn" in own or "norm" in own else stored
        assert parameter.dtype == parameter.grad.dtype == dtype, own
    assert model.bn1.running_mean.dtype == torch.float32
    assert model.shift.dtype == stored
    assert model.count.dtype == torch.int64
    precision.step(optimizer)
    for parameter in model.parameters():
        state, half = optimizer.state[parameter], parameter.dtype != torch.float32
        assert state.keys() - {"momentum_buffer"} == ({"master"} if masters and half else set())
        assert state["momentum_buffer"].dtype == (torch.float32 if masters else parameter.dtype)


def test_apex_levels_are_aliases_of_precisions_and_an_unknown_name_is_refused():
    for level, name in OPT_LEVELS.items():
        assert (Precision(level).name, Precision(level).form) == (name, PRECISIONS[name])
    with pytest.raises(ValueError, match="precision 'fp8' is not one of fp32, bf16, fp16"):
        Precision("fp8")


@pytest.mark.parametrize(("name", "make"), [*zip(MASTERS, [lars, sgd], strict=True)])
def test_an_optimizer_without_masters_is_refused_where_they_are_needed(name, make):
    precision = Precision(name)
    model, x, labels = net_and_batch()
    model = precision.convert(model)
    optimizer = make(model)
    before = [p.detach().clone() for p in model.parameters()]
    precision.backward(loss_of(precision, model, x, labels))
    with pytest.raises(ValueError, match=r"needs FP32 master weights, and (LARS|SGD) keeps none"):
        precision.step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "compiled"), [("fp32", False), ("bf16", True), ("fp16", False), ("fp16-master", True)]
)
def test_forward_is_a_context_and_a_decorator_in_every_form(name, compiled):
    """A decorator may be made before the model is converted."""
    precision = Precision(name)

    @precision.forward()
    def decorated(x, *, nested=False):
        return decorated(x) if nested else model(x) @ torch.ones(4, 3)

    model, x, _ = net_and_batch()
    model = precision.convert(model).eval()
    run = torch.compile(decorated, backend="eager", fullgraph=True) if compiled else decorated
    for _ in range(2):
        with precision.forward():
            wanted = model(x) @ torch.ones(4, 3)
        for found in (run(x), decorated(x, nested=True)):
            assert found.dtype == wanted.dtype
            torch.testing.assert_close(found, wanted)
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(TypeError):
        decorated(None)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("has_bf16", "name"), [(True, "bf16"), (False, "fp32")])
def test_auto_is_bf16_where_the_machine_computes_in_it(has_bf16, name, monkeypatch):
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: has_bf16)
    # Emulation, which old GPUs have, does not count.
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: has_bf16)
    assert [auto_precision(device) for device in ("cpu", "cuda")] == [name, name]


@pytest.mark.parametrize("name", ["fp32", "O2"])
def test_cuda_without_a_gpu_is_refused(name, monkeypatch):
    """torch would warn, and train without autocast and without a loss scale."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"on device 'cuda': torch finds no GPU; valid: 'cpu'"):
        Precision(name, "cuda")
