"""Which weights Muon orthogonalises: those of hidden layers that are one matrix."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from largebatch.lars import hidden_weights, split_parameters
from tests.lars.test_groups import names, torchvision_vit


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
