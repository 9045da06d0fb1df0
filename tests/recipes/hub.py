"""A cache of huggingface_hub with weights of timm, in place of a network."""

from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import _registry, get_pretrained_cfg

#: Bilinear and bicubic, with other means than ImageNet's, and crops of 95 %.
NAMES = ["test_resnet.r160_in1k", "test_vit.r160_in1k"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of huggingface_hub with random weights of both models for three classes."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in NAMES:
        about = replace(get_pretrained_cfg(name), num_classes=3, label_names=("ant", "bee", "cat"))
        for called in (name, name.partition(".")[0]):
            monkeypatch.setitem(_registry._model_pretrained_cfgs, called, about)
        torch.manual_seed(0)
        publish(cache, name, timm.create_model(name))
    return cache


def publish(cache, name, model):
    """Put weights where huggingface_hub keeps those that it has downloaded."""
    folder = cache / f"models--timm--{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    save_file(model.state_dict(), folder / "snapshots" / ("0" * 40) / "model.safetensors")
