"""Steps where Triton cannot launch a kernel, as without a C compiler, and where a device fails."""

import copy
import subprocess
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from triton.compiler.errors import CompilationError
from triton.runtime.errors import PTXASError

from largebatch.lars import LARS, implementations, layerwise
from largebatch.lars.batches import batches_of
from largebatch.lars.triton import launch
from tests.lars.muon.training import RULES, make, parameters, run, set_gradients
from tests.lars.problems import tensors

GPU = torch.device("cuda", 0)
NO_COMPILER = RuntimeError("Failed to find C compiler. Please specify via CC environment variable")
OF_BUILDING = [
    NO_COMPILER,
    subprocess.CalledProcessError(1, ["gcc", "main.c"]),
    FileNotFoundError("/usr/bin/cc"),
    ImportError("cuda_utils.so: undefined symbol"),
    AssertionError("libcuda.so cannot found!\nPlease run ldconfig"),
    PTXASError("ptxas fatal"),
    CompilationError(None, None, "no such type"),
]
OF_THE_DEVICE = [
    torch.OutOfMemoryError("CUDA out of memory"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    MemoryError(),
]


def lars(**options):
    return LARS([nn.Parameter(t) for t in tensors(0, torch.float32)], 0.1, **options)


OPTIMIZERS = [
    lars,
    partial(lars, momentum=0.0),
    partial(lars, nesterov=True, denominator="norm-of-sum"),
    *(partial(make, rules=[rule]) for rule in RULES if rule != "adamw"),
]


@contextmanager
def first_launch(error, captures=False):
    """Take parameters on the CPU for a GPU's, whose first launch fails; yield where that was."""
    tried = []

    def fail(device):
        tried.append(device)
        raise copy.copy(error)

    def on_gpu(*arguments):
        return {k._replace(device=GPU): batch for k, batch in batches_of(*arguments).items()}

    implementations._warn_once.cache_clear()
    with (
        mock.patch.object(launch, "_launch", fail),
        mock.patch.object(layerwise, "batches_of", on_gpu),
        mock.patch("largebatch.lars.capture.captures", return_value=captures),
        mock.patch.dict(launch._errors, clear=True),
    ):
        yield tried


def stepped(optimizer, steps=3):
    """Return parameters and state after some steps."""
    run(optimizer, range(steps))
    return copy.deepcopy((parameters(optimizer), optimizer.state_dict()["state"]))


@pytest.mark.parametrize(
    ("of", "error"),
    [(OPTIMIZERS[i % len(OPTIMIZERS)], error) for i, error in enumerate(OF_BUILDING)],
    ids=lambda value: type(value).__name__,
)
def test_steps_are_those_of_foreach_with_one_warning(of, error):
    optimizer, expected = of(), of()
    expected.implementation = "foreach"
    with (
        first_launch(error) as tried,
        pytest.warns(RuntimeWarning, match=r"on cuda:0: .*; it takes 'foreach'") as found,
    ):
        found_state = stepped(optimizer)
    assert tried == [GPU]
    assert len(found) == 1
    assert type(error).__name__ in str(found[0].message)
    assert "\n" not in str(found[0].message)
    torch.testing.assert_close(found_state, stepped(expected), rtol=0, atol=0)


@given(
    of=st.sampled_from(OPTIMIZERS),
    error=st.sampled_from([*OF_BUILDING, *OF_THE_DEVICE]),
    name=st.sampled_from(["auto", "triton"]),
    ranks=st.integers(1, 2),
    captures=st.booleans(),
    steps=st.integers(0, 2),
)
def test_a_launch_that_fails_changes_nothing(of, error, name, ranks, captures, steps):
    """Errors of the device, and in a capture, are never taken for a missing compiler."""
    optimizer = of()
    optimizer.implementation = "foreach"
    before = stepped(optimizer, steps)
    optimizer.implementation = name
    set_gradients(optimizer, steps)
    with (
        first_launch(error, captures) as tried,
        mock.patch.object(dist, "is_initialized", return_value=ranks > 1),
        mock.patch.object(dist, "get_world_size", return_value=ranks),
        mock.patch.object(dist, "get_rank", return_value=1),
    ):
        if not captures and error in OF_BUILDING and name == "auto" and ranks == 1:
            with pytest.warns(RuntimeWarning, match="foreach"):
                optimizer._prepare([layerwise.batches_of(g, 0) for g in optimizer.param_groups])
        elif captures:
            with pytest.raises(RuntimeError, match=r"not tried .*; valid: take a step before"):
                optimizer.step()
        elif error in OF_BUILDING:
            with pytest.raises(ValueError, match=f"implementation {name!r}.* cuda:0: .*; valid"):
                optimizer.step()
        else:
            with pytest.raises(type(error)):
                optimizer.step()
            with pytest.raises(type(error)):  # and tries again
                optimizer.step()
            assert tried == [GPU] * 2
    torch.testing.assert_close(stepped(optimizer, 0), before, rtol=0, atol=0)


def test_no_launch_is_tried_where_no_step_needs_it():
    with first_launch(NO_COMPILER) as tried:
        stepped(make(rules=["adamw"]))
        stepped(lars(implementation="foreach"))
        stepped(lars(dialect="simclr-popular"))
    assert tried == []
