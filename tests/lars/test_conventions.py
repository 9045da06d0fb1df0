"""``LARS.like`` against the libraries themselves where they are installed, else their formulas.

Steps in float64 under a changing learning rate, on tensors of 0 to 4 dimensions, some of which have
zero weights or, at times, a zero gradient.
"""

import os
import subprocess
import sys
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import timm.optim
import torch
from torch import nn

from benchmarks.lars.published import Published
from largebatch.lars import CONVENTIONS, LARS, polynomial
from tests.lars.problems import assert_close, train

ROOT = Path(__file__).parents[2]
SCHEDULE = polynomial(2.0, 40, warmup_steps=10, end=0.01)
NESTEROV = [
    *("mlperf", "simclr", "simclr-popular", "moco-v3", "timm", "torchlars", "lightly"),
    *("solo-learn", "torch-optimizer", "lightning-bolts", "pytorch-optimizer"),
    *("apex", "apex-scale"),
]

#: Groups that users pass: all parameters at once; those of 1 dimension apart, as Barlow Twins and
#: DINO do; and without weight decay, as timm does.
GROUPS = {
    "one group": lambda p: p,
    "two groups": lambda p: [
        {"params": [t for t in p if t.dim() != 1]},
        {"params": [t for t in p if t.dim() == 1]},
    ],
    "vectors without decay": lambda p: [
        {"params": [t for t in p if t.dim() > 1]},
        {"params": [t for t in p if t.dim() <= 1], "weight_decay": 0.0},
    ],
}


def trained(make, zero_gradients=True):
    """Train the shared problem; tensor 2 and 5 start at zero, 0 and 3 have no gradient at times."""

    def zero_weights(parameters):
        for i in (2, 5):
            parameters[i].data.zero_()

    def zero_some(step, parameters):
        if zero_gradients and step % 3 == 1:
            for i in (0, 3):
                parameters[i].grad.zero_()

    return train(make, 40, schedule=SCHEDULE, edit=zero_weights, edit_gradients=zero_some)


@pytest.mark.parametrize(
    ("library", "groups"), [*zip([n for n in CONVENTIONS if n != "optax"], cycle(GROUPS))]
)
def test_lars_like_a_library_takes_its_steps(library, groups):
    """With the library's own class where it is installed, else its formula, and its defaults."""
    own = {"timm": timm.optim.Lars}.get(library, partial(Published, library))
    if library == "pytorch-optimizer":
        own = pytest.importorskip("pytorch_optimizer").LARS  # in the extra "dev"
    # Where the gradient is zero, pytorch_optimizer's ratio is coefficient / weight decay.
    zeros = library != "pytorch-optimizer"
    of = GROUPS[groups]
    cases = [{"weight_decay": 1e-2}, {"weight_decay": 0.0}]
    if library in NESTEROV:
        cases.append({"weight_decay": 1e-2, "momentum": 0.8, "nesterov": True})
    for case in cases:
        ours = trained(lambda p, c=case: LARS.like(library, of(p), 1.0, **c), zeros)
        assert_close(ours, trained(lambda p, c=case: own(of(p), lr=1.0, **c), zeros), 1e-12)


def test_adapt_true_is_timms_always_adapt():
    groups = GROUPS["vectors without decay"]
    options = {"weight_decay": 1e-2, "momentum": 0.9, "trust_clip": True}
    theirs = trained(lambda p: timm.optim.Lars(groups(p), 1.0, always_adapt=True, **options))
    ours = trained(lambda p: LARS.like("timm", groups(p), 1.0, adapt=True, **options))
    assert_close(ours, theirs, 1e-12)


OPTAX = """
import sys, torch
from benchmarks.lars.published import Optax
from tests.lars.test_conventions import GROUPS, trained
torch.save({(decay, nesterov): trained(
    lambda p: Optax(p, 1.0, weight_decay=decay, nesterov=nesterov)
) for decay, nesterov in ((0.0, False), (1e-2, True))}, sys.argv[1])
"""


@pytest.mark.slow("imports jax and compiles optax's steps in a process of its own")
def test_lars_like_optax_takes_the_steps_of_optax(tmp_path):
    """In a process of its own, because jax's threads would outlive the test."""
    pytest.importorskip("optax")  # in the extra "dev"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", OPTAX, str(tmp_path / "optax.pt")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = torch.load(tmp_path / "optax.pt", weights_only=False)
    assert len(found) == 2
    for (decay, nesterov), expected in found.items():
        options = {"weight_decay": decay, "nesterov": nesterov}
        ours = trained(lambda p, o=options: LARS.like("optax", p, 1.0, **o))
        assert_close(ours, expected, 1e-12)


def test_groups_are_split_by_what_the_library_exempts():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    weights, vectors = ["0.weight"], ["0.bias", "1.weight", "1.bias"]
    split = [(weights, 0.1, True), (vectors, 0.0, False)]
    one = [([*weights, *vectors], 0.1, True)]

    def like(library, params, decay=0.1):
        of_groups = LARS.like(library, params, 0.5, weight_decay=decay).param_groups
        return [(g["param_names"], g["weight_decay"], g["adapt"]) for g in of_groups]

    for library in ("vicreg", "moco-v3", "mlperf"):
        assert like(library, model.named_parameters()) == split
    for library in ("timm", "apex", "optax"):
        assert like(library, model.named_parameters()) == one
    assert like("timm", model.named_parameters(), 0.0) == [([*weights, *vectors], 0.0, False)]
    # A group's own options, and a group that is exempt as a whole.
    groups = [
        {"params": [model[0].weight], "lr": 7.0},
        {"params": model[0].bias, "weight_decay": 0.2},  # a tensor alone, as torch allows
        {"params": model[1].weight, "adapt": True},  # stays as it is
    ]
    optimizer = LARS.like("dino", groups, 0.5, weight_decay=0.1)
    found = [(g["lr"], g["weight_decay"], g["adapt"]) for g in optimizer.param_groups]
    assert found == [(7.0, 0.1, True), (0.5, 0.0, False), (0.5, 0.1, True)]
    assert [set(g) - {"params"} for g in groups[:2]] == [{"lr"}, {"weight_decay"}]  # unchanged


def test_options_override_the_table_and_an_unknown_library_is_refused_by_name():
    optimizer = LARS.like(
        "apex", nn.Linear(3, 3).parameters(), 0.1, momentum=0.5, eps=0.1, master_weights=True
    )
    optimizer.add_param_group({"params": list(nn.Linear(3, 3).parameters())})
    for group in optimizer.param_groups:  # one that is added later adapts where all tensors do
        assert (group["momentum"], group["eps"], group["adapt"]) == (0.5, 0.1, True)
    assert optimizer.master_weights is True
    with pytest.raises(ValueError, match=r"library must be one of you2017, .*, not 'tim'"):
        LARS.like("tim", [nn.Parameter(torch.ones(2))], 0.1)
    for params in (torch.ones(3), [], ["weight"], [{"params": {nn.Parameter(torch.ones(2))}}]):
        with pytest.raises((TypeError, ValueError)):
            LARS.like("vicreg", params, 0.1)
