"""Bytes per parameter that each precision stores and that DDP reduces, counted by tensor."""

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from largebatch.amp import PRECISIONS, Precision
from largebatch.amp.convert import is_norm
from tests.amp.nets import loss_of, net_and_batch, optimizer_for
from tests.ranks import run_ranks

# Bytes per parameter: the parameter, its gradient, master and momentum; and what DDP reduces.
BYTES = {
    "fp32": (4, 4, 0, 4, 4),
    "bf16": (4, 4, 0, 4, 4),
    "fp16": (4, 4, 0, 4, 4),
    "bf16-master": (2, 2, 4, 4, 2),
    "fp16-master": (2, 2, 4, 4, 2),
    "fp16-pure": (2, 2, 0, 2, 2),
}
NORM = (4, 4, 0, 4, 4)
KINDS = [(name, kind) for name in PRECISIONS for kind in ("lars", "sgd") if (name, kind) != (
    "fp16-pure", "sgd")]  # torch's SGD does not unscale FP16 gradients # fmt: skip


def trained(name, kind):
    model, x, labels = net_and_batch()
    precision = Precision(name)
    model = precision.convert(model)
    optimizer = optimizer_for(precision, model, kind)
    precision.backward(loss_of(precision, model, x, labels))
    precision.step(optimizer)
    return model, optimizer


def total(tensors):
    return sum(t.nbytes for t in tensors)


def parameters_by_kind(model):
    norms = [p for m in model.modules() if is_norm(m) for p in m.parameters(recurse=False)]
    ids = {id(p) for p in norms}
    return norms, [p for p in model.parameters() if id(p) not in ids]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_bytes_stored_per_parameter(name, kind):
    model, optimizer = trained(name, kind)
    ids = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    states = {ids[i]: state for i, state in optimizer.state_dict()["state"].items()}
    for parameters, expected in zip(parameters_by_kind(model), (NORM, BYTES[name]), strict=True):
        count = sum(p.numel() for p in parameters)
        stored = (
            total(parameters),
            total(p.grad for p in parameters),
            total(states[p]["master"] for p in parameters if "master" in states[p]),
            total(states[p]["momentum_buffer"] for p in parameters),
        )
        assert stored == tuple(count * size for size in expected[:4])
        keys = {key for p in parameters for key in states[p]}
        assert keys <= {"master", "momentum_buffer"}  # no other tensors


def reduced_bytes(names):
    return {name: _reduced_bytes(name) for name in names}


def _reduced_bytes(name):
    model, x, labels = net_and_batch()
    precision = Precision(name)
    ddp = DistributedDataParallel(precision.convert(model))
    seen = []

    def hook(state, bucket):
        seen.append(bucket.buffer().nbytes)
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, hook)
    precision.backward(loss_of(precision, ddp, x, labels))
    return sum(seen)


@pytest.mark.slow("trains on two ranks")
def test_bytes_reduced_by_ddp():
    model, *_ = net_and_batch()
    norms, others = ([p.numel() for p in kind] for kind in parameters_by_kind(model))
    for sent in run_ranks(2, reduced_bytes, ["fp32", "bf16", "fp16-master", "fp16-pure"]):
        for name, size in sent.items():
            assert size == sum(norms) * NORM[4] + sum(others) * BYTES[name][4], name
