"""What decays and what adapts is found by module, not by name."""

import timm
import torch
from torch import nn

from largebatch.lars import split_parameters


def names(groups, **wanted):
    return {
        name
        for group in groups
        if all(group[key] == value for key, value in wanted.items())
        for name, _ in group["params"]
    }


def test_biases_and_norms_of_a_resnet_neither_decay_nor_adapt():
    model = timm.create_model("resnet50", num_classes=10)
    groups = split_parameters(model, 5e-5)
    plain = names(groups, weight_decay=0.0, adapt=False)
    decayed = names(groups, weight_decay=5e-5, adapt=True)
    assert plain | decayed == {name for name, _ in model.named_parameters()}
    by_module = {
        f"{prefix}.{own}"
        for prefix, module in model.named_modules()
        for own, _ in module.named_parameters(recurse=False)
        if isinstance(module, nn.BatchNorm2d) or own == "bias"
    }
    assert plain == by_module
    # The norm of a downsampling shortcut has neither "bn" nor "norm" in its name.
    assert {"layer1.0.downsample.1.weight", "layer1.0.downsample.1.bias"} <= plain
    assert len(plain) == 107
    assert len(decayed) == 54


def test_norms_written_from_scratch_are_found_by_their_class():
    class ScaleNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

    model = nn.Sequential(nn.Linear(3, 3), ScaleNorm(), nn.LayerNorm(3), nn.GroupNorm(1, 3))
    groups = split_parameters(model, 0.1)
    assert names(groups, adapt=True) == {"0.weight"}


def test_frozen_parameters_are_left_out_and_tied_ones_taken_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    groups = split_parameters(model, 0.1)
    assert names(groups) == {"0.weight", "2.weight"}
    assert sum(len(group["params"]) for group in groups) == 2


def test_predicates_are_independent():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    groups = split_parameters(
        model,
        0.1,
        no_decay=lambda module, name, parameter: name.endswith("bias"),
        no_adapt=lambda module, name, parameter: isinstance(module, nn.BatchNorm1d),
    )
    assert names(groups, weight_decay=0.1, adapt=True) == {"0.weight"}
    assert names(groups, weight_decay=0.0, adapt=True) == {"0.bias"}
    assert names(groups, weight_decay=0.1, adapt=False) == {"1.weight"}
    assert names(groups, weight_decay=0.0, adapt=False) == {"1.bias"}
    torch.optim.SGD(groups, lr=0.1)  # any torch optimizer takes them
