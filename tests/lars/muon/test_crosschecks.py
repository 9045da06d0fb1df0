"""Muon takes the steps of timm's, torch's, Jordan's and airbench94's, and of U Vᵀ by SVD."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lars.muon_crosschecks import (
    CONVOLUTIONS,
    LR,
    MATRICES,
    TIMM_SETTINGS,
    TORCH_SETTINGS,
    VECTORS,
    combinations,
    difference,
    muon,
    others,
    timms,
    to_airbench,
    to_jordan,
    to_reference,
    torchs,
    train,
)
from largebatch.lars import LARS
from largebatch.lars.muon.reference import ADJUST_LR_FNS, CONV_MODES

FP64, BF16 = torch.float64, torch.bfloat16
SHAPES = MATRICES + CONVOLUTIONS


@given(
    momentum=st.sampled_from([0.5, 0.95]),
    **{name: st.sampled_from(values) for name, values in TIMM_SETTINGS.items()},
)
@settings(max_examples=8, deadline=None)
def test_steps_are_those_of_timms_muon(**setting):
    ours, theirs = (train_by(FP64, SHAPES, **setting) for train_by in (muon, timms))
    assert difference(ours, theirs) < 1e-12


def torchs_muon_has(adjust_lr_fn):
    """Whether torch's Muon has a factor; that of 2.11 lacks ``spectral_unclamped``."""
    try:
        torch.optim.Muon([torch.nn.Parameter(torch.ones(2, 2))], adjust_lr_fn=adjust_lr_fn)
    except ValueError:
        return False
    return True


def test_steps_are_those_of_torchs_muon():
    for setting in combinations(TORCH_SETTINGS):
        if not torchs_muon_has(setting["adjust_lr_fn"]):
            continue
        ours, theirs = (train_by(FP64, MATRICES, **setting) for train_by in (muon, torchs))
        assert difference(ours, theirs) < 1e-12, setting
    setting = {"adjust_lr_fn": "original", "nesterov": True, "weight_decay": 0.1}
    ours, theirs = (train_by(BF16, MATRICES, **setting) for train_by in (muon, torchs))
    assert difference(ours, theirs) < 0.08


def test_steps_are_those_of_jordans_muon():
    """For a convolution, his factor is that of the two sides of its kernel: 1 for a square one."""
    assert to_jordan(MATRICES, "original") < 1e-12
    convolutions = [shape for shape in CONVOLUTIONS if len(shape) == 4]
    assert to_jordan(convolutions, "none") < 1e-12
    assert to_jordan([(8, 2, 3, 3)], "original") < 1e-12
    assert to_jordan([(9, 2, 1, 1)], "original") > 0.1


def test_steps_are_those_of_airbench94_whose_momentum_is_that_of_sgd():
    for nesterov in (False, True):
        assert to_airbench(nesterov) < 1e-12


@given(
    adjust_lr_fn=st.sampled_from(ADJUST_LR_FNS),
    conv_mode=st.sampled_from(CONV_MODES),
    norm_projection=st.booleans(),
    nesterov=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
)
@settings(max_examples=4, deadline=None)
def test_steps_are_those_of_the_singular_value_decomposition(**setting):
    assert to_reference(**setting) < 1e-9


def test_the_rules_for_other_groups_are_those_of_torch_and_lars():
    for nesterov in (False, True):
        options = {"momentum": 0.85, "nesterov": nesterov, "weight_decay": 0.1}
        sgd = train(lambda p, o=options: torch.optim.SGD(p, LR, **o), VECTORS)
        assert difference(train(others(rule="sgd", **options), VECTORS), sgd) < 1e-12
        lars = train(lambda p, o=options: LARS(p, LR, dialect="torch", **o), VECTORS)
        assert difference(train(others(rule="lars", **options), VECTORS), lars) < 1e-12
        assert difference(sgd, lars) > 0.1
