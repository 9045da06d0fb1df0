"""Parameter groups: which tensors decay, adapt and are orthogonalised, by module and shape."""

from functools import partial

import pytest
import timm
import timm.optim
import torch
import torchvision
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from largebatch.lars import (
    LARS,
    Muon,
    describe,
    hidden_weights,
    is_bias_or_norm,
    is_vector,
    is_vector_or_position,
    split_parameters,
)
from largebatch.lars.groups import named


def names(groups, **wanted):
    return {
        name
        for group in groups
        if all(group[key] == value for key, value in wanted.items())
        for name, _ in group["params"]
    }


torchvision_vit = partial(torchvision.models.VisionTransformer, 32, 8, 2, 2, 16, 32)

# For each model: the last name components of the parameters that neither decay nor adapt besides
# norms and biases, and of those that adapt without decay.
NORMS = (nn.BatchNorm2d, nn.LayerNorm)
timm_vit = partial(timm.create_model, "test_vit", init_values=1e-5)
MODELS = {
    "timm convnext": (partial(timm.create_model, "convnext_atto"), ["gamma"], []),
    "timm vit": (timm_vit, ["gamma", "cls_token"], ["pos_embed"]),
    "torchvision convnext": (torchvision.models.convnext_tiny, ["layer_scale"], []),
    "torchvision vit": (torchvision_vit, ["class_token"], ["pos_embedding"]),
    "torchvision efficientnet": (torchvision.models.efficientnet_b0, [], []),
}


@pytest.mark.parametrize("library_and_model", MODELS)
def test_groups_of_models_of_timm_and_torchvision(library_and_model):
    make, vectors, tables = MODELS[library_and_model]
    with torch.device("meta"):
        model = make()
    groups = split_parameters(model, 5e-5, no_decay=is_vector_or_position, no_adapt=is_vector)
    everything = {name for name, _ in model.named_parameters()}
    norms = [prefix for prefix, module in model.named_modules() if isinstance(module, NORMS)]
    default = {n for n in everything if n.endswith("bias") or n.rpartition(".")[0] in norms}

    def ending(endings):
        found = {name for name in everything if name.split(".")[-1] in endings}
        assert {name.split(".")[-1] for name in found} == set(endings)
        return found

    plain = default | ending(vectors)
    assert names(groups, weight_decay=0.0, adapt=False) == plain
    assert names(groups, weight_decay=0.0, adapt=True) == ending(tables)
    assert names(groups, weight_decay=5e-5, adapt=True) == everything - plain - ending(tables)
    assert names(groups) == everything
    assert sum(len(group["params"]) for group in groups) == len(everything)
    groups = split_parameters(model, 5e-5)
    assert names(groups, weight_decay=0.0, adapt=False) == default
    assert names(groups, weight_decay=5e-5, adapt=True) == everything - default


def cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).double()


def test_groups_of_split_parameters_say_what_adapts_whatever_the_shape():
    model = cnn()
    model.scale = nn.Parameter(torch.ones(4))
    model.table_bias = nn.Parameter(torch.ones(4, 4))
    for default in (None, False, True):
        optimizer = LARS(split_parameters(model, 0.1), 0.1, adapt=default)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        adapting = {name for name, ratio in optimizer.trust_ratios().items() if ratio != 1}
        assert adapting == {"scale", "0.weight", "4.weight"}


def test_describe_shows_what_adapts_by_shape_and_what_is_orthogonalised():
    model = cnn()
    table = describe(LARS(model.parameters(), 0.1).param_groups)
    assert table.splitlines()[2:4] == [
        "group0.0   4 x 1 x 3 x 3  no      yes",
        "group0.1   4              no      no",
    ]
    assert table.splitlines()[-1] == "6 tensors  243 numbers    no      some"
    groups = describe(timm.optim.param_groups_weight_decay(model, 1e-2))
    assert [line.split()[-1] for line in groups.splitlines()[-2:]] == ["no", "yes"]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 2))
    groups = split_parameters(model, 5e-4, orthogonal=hidden_weights(model))
    table = describe(groups)
    assert table == describe(Muon(groups, 0.1).param_groups)
    last = {line.split()[0]: line.split()[-1] for line in table.splitlines()[2:8]}
    assert {name for name, answer in last.items() if answer == "yes"} == {"1.weight"}
    assert table.splitlines()[-1] == "1 tensors  576 numbers    yes     yes     yes"


def test_predicates_are_independent_frozen_parameters_left_out_and_tied_ones_taken_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    filters = {
        "no_decay": lambda module, name, parameter: name.endswith("bias"),
        "no_adapt": lambda module, name, parameter: isinstance(module, nn.BatchNorm1d),
    }
    groups = split_parameters(model, 0.1, **filters)
    assert names(groups, weight_decay=0.1, adapt=True) == {"0.weight"}
    assert names(groups, weight_decay=0.0, adapt=True) == {"0.bias"}
    assert names(groups, weight_decay=0.1, adapt=False) == {"1.weight"}
    assert names(groups, weight_decay=0.0, adapt=False) == {"1.bias"}
    assert sum(len(group["params"]) for group in groups) == 4
    torch.optim.SGD(groups, lr=0.1)  # any torch optimizer takes them


def test_a_parametrized_bias_is_a_bias():
    layer = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(layer, "bias", nn.Identity())
    nn.utils.parametrizations.weight_norm(layer)
    found = {
        name: is_bias_or_norm(module, name, parameter)
        for prefix, module in layer.named_modules()
        for name, parameter in module.named_parameters(prefix, recurse=False)
    }
    assert found == {
        "parametrizations.bias.original": True,
        "parametrizations.weight.original0": False,
        "parametrizations.weight.original1": False,
    }


def of(module, shape, name="alpha"):
    setattr(module, name, nn.Parameter(torch.ones(shape)))
    return module, name


class Layer(nn.Module):
    """Neither a norm layer nor called one."""


class MyNorm(nn.Module):
    """Called a norm layer."""


class NormedLinear(nn.Linear):
    """Normalises its own weight, which is a matrix."""


@pytest.mark.parametrize(
    ("module", "name", "answers"),
    [
        (nn.Linear(3, 3), "bias", (True, True, True)),
        (nn.GRUCell(4, 4), "bias_ih", (True, True, True)),
        (nn.LSTM(4, 4, proj_size=2), "weight_hr_l0", (False, False, False)),
        (nn.MultiheadAttention(8, 2, add_bias_kv=True), "bias_k", (True, True, True)),
        (nn.MultiheadAttention(8, 2), "in_proj_bias", (True, True, True)),
        (*of(Layer(), (4, 4), "relative_bias_table"), (False, False, False)),
        (nn.LayerNorm((2, 3, 4)), "weight", (True, True, True)),
        (*of(nn.GroupNorm(1, 3), (3, 4)), (True, True, True)),
        (*of(timm.layers.RmsNorm(3), (1, 3, 4)), (True, True, True)),
        (*of(MyNorm(), (1, 3, 1, 1), "weight"), (True, True, True)),
        (*of(MyNorm(), (3, 1)), (True, True, True)),
        (*of(MyNorm(), (3, 2)), (False, False, False)),
        (nn.Linear(3, 1), "weight", (False, False, False)),
        (NormedLinear(3, 3), "weight", (False, False, False)),
        (nn.Conv2d(1, 1, (3, 1)), "weight", (False, False, False)),
        (nn.PReLU(3), "weight", (False, True, True)),
        (timm.layers.LayerScale(3), "gamma", (False, True, True)),
        (*of(Layer(), ()), (False, True, True)),
        (*of(Layer(), (4, 9)), (False, False, False)),
        (*of(Layer(), (3, 1, 1), "layer_scale"), (False, True, True)),
        (*of(Layer(), (1, 1, 3), "cls_token"), (False, True, True)),
        (*of(Layer(), (1, 4, 3), "pos_embed"), (False, False, True)),
    ],
)
def test_the_guides_table_of_predicates(module, name, answers):
    predicates = (is_bias_or_norm, is_vector, is_vector_or_position)
    parameter = getattr(module, name)
    assert tuple(p(module, f"layer.{name}", parameter) for p in predicates) == answers


def named_and_plain(groups):
    made = []
    for i, (has_names, count) in enumerate(groups):
        of = [nn.Parameter(torch.ones(2, 3)) for _ in range(count)]
        made.append({"params": [(f"name{i}.{j}", p) if has_names else p for j, p in enumerate(of)]})
    return made


@pytest.mark.parametrize("kind", [LARS, Muon])
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=2, max_size=4))
@example([(False, 0), (True, 1)])
def test_groups_with_and_without_names_go_together(kind, groups):
    """As where Lightning unfreezes a layer beside the named groups of split_parameters."""
    first, *others = named_and_plain(groups)
    at_once, later = kind(named_and_plain(groups), 0.1), kind([first], 0.1)
    for group in others:
        later.add_param_group(group)
    wanted = [
        f"{'name' if is_named else 'group'}{i}.{j}"
        for i, (is_named, count) in enumerate(groups)
        for j in range(count)
    ]
    for optimizer in (at_once, later):
        pairs = [pair for i, g in enumerate(optimizer.param_groups) for pair in named(g, i)]
        assert [name for name, _ in pairs] == wanted
        for _, parameter in pairs:
            parameter.grad = parameter.detach() + 1
        optimizer.step()
    any_named = any(is_named and count for is_named, count in groups)
    assert all(("param_names" in group) is any_named for group in later.param_groups)
    later.load_state_dict(at_once.state_dict())


def hidden(model):
    return names(split_parameters(model, 0.1, orthogonal=hidden_weights(model)), orthogonal=True)


# For each model: the layers that are left out of Muon besides grouped convolutions.
OUTER = {
    "resnet50": (torchvision.models.resnet50, {"conv1", "fc"}),
    "torchvision vit": (torchvision_vit, {"conv_proj", "heads.head"}),
    # Two classifiers.
    "deit_tiny_distilled_patch16_224": (None, {"patch_embed.proj", "head", "head_dist"}),
    "convnext_atto": (None, {"stem.0", "head.fc"}),
}


@pytest.mark.parametrize("name", OUTER)
def test_hidden_weights_are_those_of_all_layers_but_the_outer_and_the_grouped(name):
    make, outer = OUTER[name]
    with torch.device("meta"):
        model = timm.create_model(name) if make is None else make()
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    grouped = {n for n, m in layers.items() if getattr(m, "groups", 1) > 1}
    fused = {n for n, _ in model.named_parameters() if n.endswith("in_proj_weight")}
    assert outer <= layers.keys()
    assert hidden(model) == {f"{n}.weight" for n in layers.keys() - outer - grouped} | fused
    assert bool(grouped) == name.startswith("convnext")
    assert len(fused) == (2 if name == "torchvision vit" else 0)


def test_the_first_layer_and_the_classifiers_are_those_of_the_model():
    with torch.device("meta"):
        model = timm.create_model("test_vit", num_classes=0)  # features, without a classifier
    left_out = {n for n, p in model.named_parameters() if p.dim() > 1} - hidden(model)
    assert left_out == {"cls_token", "pos_embed", "patch_embed.proj.weight"}
    assert hidden(nn.DataParallel(model)) == {f"module.{name}" for name in hidden(model)}
    # The input layer of a language model is its embedding, which its classifier may share.
    embedding, head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
    model = nn.Sequential(embedding, nn.Linear(4, 4), nn.Linear(4, 4), head)
    assert hidden(model) == {"1.weight", "2.weight"}
    head.weight = embedding.weight
    assert hidden(model) == {"1.weight", "2.weight"}
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    model[0].requires_grad_(False)  # which does not make the next layer the input
    assert hidden(model) == {"1.weight"}


def test_only_whole_matrices_of_layers_are_hidden():
    outer = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with torch.device("meta"):
        empty = nn.Conv2d(4, 4, 1)
        empty.weight = nn.Parameter(torch.empty(0, 4, 1, 1))
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    others = [nn.Linear(4, 1), nn.Linear(1, 4), empty, normed, nn.Conv1d(4, 4, 3, groups=4)]
    others += [nn.ConvTranspose2d(4, 4, 3), nn.Embedding(4, 4), nn.LSTM(4, 4)]
    taken = [nn.Linear(2, 2), nn.Conv1d(1, 2, 3), nn.Conv3d(2, 4, 3), nn.Conv2d(4, 4, 1)]
    attention = nn.MultiheadAttention(4, 2, kdim=6, add_bias_kv=True)
    model = nn.Sequential(outer[0], *others, *taken, attention, outer[1])
    first = 1 + len(others)
    expected = {f"{first + i}.weight" for i in range(len(taken))}
    attention = {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"}
    assert hidden(model) == expected | {f"{first + len(taken)}.{name}" for name in attention}
