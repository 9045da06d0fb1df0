"""lars and amp recognise the same norm layers, each with its own predicate.

Neither subpackage may import the other, so ``largebatch.lars.is_bias_or_norm`` and
``largebatch.amp.convert`` state the same rule twice. A norm layer of torch, timm or torchvision, or
a subclass, owns norm parameters of any shape; a class that is only called norm owns those with at
most one axis longer than one.
"""

import inspect
import sys

import timm.layers
import timm.models
import torch
import torchvision
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from largebatch.amp import Precision
from largebatch.amp.convert import is_norm
from largebatch.lars import is_bias_or_norm, split_parameters

# Classes with "Norm" in their names that are not norm layers: blocks, heads and whole models.
BLOCKS = {
    *("ClNormMlpClassifierHead", "Conv2dNorm", "Conv2dNormActivation", "Conv3dNormActivation"),
    *("ConvMlpWithNorm", "ConvNorm", "ConvNormAct", "ConvNormActivation", "DownsampleNormFirst"),
    *("EvaBlockPostNorm", "GlobalResponseNormMlp", "LinearNorm", "NormFreeBlock", "NormFreeNet"),
    *("NormLinear", "NormMlp", "NormMlpClassifierHead", "NormalCell", "SeparableConvNormAct"),
}


def classes(*packages):
    """Return the module classes of ``packages`` whose name or base class suggests a norm."""
    names = tuple(package.__name__ + "." for package in packages)
    found = {
        value
        for name, module in sys.modules.items()
        if name.startswith(names)
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, nn.Module)
    }
    bases = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
    return sorted(
        (
            c
            for c in found
            if any(word in c.__name__.lower() for word in ("norm", "abn")) or issubclass(c, bases)
        ),
        key=lambda c: (c.__module__, c.__name__),
    )


CLASSES = classes(nn.modules, timm.layers, timm.models, torchvision.ops)
LAYERS = [c for c in CLASSES if c.__name__ not in BLOCKS and not c.__name__.startswith("_")]
SMALL_BLOCKS = [
    timm.layers.ConvNormAct(8, 8),
    timm.layers.NormMlpClassifierHead(8, 4),
    timm.layers.GlobalResponseNormMlp(8),
    timm.layers.SeparableConvNormAct(8, 8),
    torchvision.ops.Conv2dNormActivation(8, 8),
    timm.models.levit.ConvNorm(8, 8),
    timm.models.levit.NormLinear(8, 8),
]


def built(layer):
    """Return an instance with 32 channels, which the groups of timm's group norms divide."""
    first = next(iter(inspect.signature(layer).parameters))
    return layer(2, 32) if first == "num_groups" else layer(32)


def verdicts(module):
    """Return whether lars and amp each treat a module as a norm layer."""
    parameter = nn.Parameter(torch.ones(2, 2))
    return is_bias_or_norm(module, "layer.table", parameter), is_norm(module)


def test_norm_layers_of_torch_timm_and_torchvision_are_norms_to_both_and_blocks_to_neither():
    known = {nn.BatchNorm2d, nn.SyncBatchNorm, nn.LayerNorm, nn.RMSNorm, nn.InstanceNorm1d}
    known |= {timm.layers.BatchNormAct2d, timm.layers.EvoNorm2dS0, timm.layers.RmsNorm}
    assert known <= {*LAYERS}
    assert {c.__name__ for c in CLASSES} >= BLOCKS
    assert len(LAYERS) > 50
    assert [layer for layer in LAYERS if verdicts(built(layer)) != (True, True)] == []
    assert [block for block in SMALL_BLOCKS if verdicts(block) != (False, False)] == []


KNOWN = [
    *(nn.LayerNorm, nn.BatchNorm2d, timm.layers.RmsNorm, timm.layers.grn.GlobalResponseNorm),
    *(timm.layers.EvoNorm2dS0, timm.layers.InplaceAbn, torchvision.ops.FrozenBatchNorm2d),
]
UNKNOWN = {nn.Module: (), nn.Linear: (4, 4), nn.Conv2d: (4, 4, 1)}
shapes = st.lists(st.integers(1, 3), max_size=4).map(tuple)


@given(
    st.sampled_from(["NormedLinear", "MyNorm", "LayerNorm", "Cosine", "Renormalise"]),
    st.sampled_from([*KNOWN, *UNKNOWN]),
    st.dictionaries(st.sampled_from(["weight_g", "gain", "table", "alpha"]), shapes, min_size=1),
    st.booleans(),
)
@example("NormedLinear", nn.Module, {"table": (3, 2)}, False)
@example("SwitchNorm2d", nn.Module, {"gain": (1, 3, 1, 1), "alpha": ()}, False)
def test_own_parameters_of_any_shape_follow_the_rule_in_both(name, base, parameters, with_child):
    module = type(name, (base,), {})(*UNKNOWN.get(base, (4,)))
    for own, shape in parameters.items():
        setattr(module, own, nn.Parameter(torch.ones(shape)))
    if with_child:
        module.child = nn.Linear(3, 3)
    called = "Norm" in name and base is nn.Module and not with_child
    wanted = {
        own
        for own, shape in parameters.items()
        if base in KNOWN or (called and sum(size > 1 for size in shape) <= 1)
    }
    groups = split_parameters(module, 0.1)
    plain = {n for group in groups if not group["adapt"] for n, _ in group["params"]}
    model = Precision("bf16-master").convert(nn.Sequential(module))[0]
    in_fp32 = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert plain & parameters.keys() == in_fp32 & parameters.keys() == wanted
