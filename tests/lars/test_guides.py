"""The snippets of the guides about LARS, gradient noise and Muon run as printed."""

import re
from itertools import repeat
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from largebatch.lars import LARS, GradientNoise

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def snippet(guide, word):
    """Return the block of Python of a guide that has a word or, of Muon's, that name."""
    text = (GUIDES / guide).read_text(encoding="utf-8")
    blocks = re.findall(r"(?:<!-- snippet: (\w+) -->\n)?```python\n(.*?)```", text, re.DOTALL)
    (code,) = (code for name, code in blocks if name == word or (not name and word in code))
    return code


def test_the_range_test():
    model = nn.Linear(3, 2)
    names = {"model": model, "criterion": nn.CrossEntropyLoss()}
    names["optimizer"] = LARS(model.parameters(), 0.05)
    names["loader"] = repeat((torch.randn(8, 3), torch.arange(8) % 2))
    exec(snippet("lars.md", "lr_range_test"), names)
    assert names["found"].suggested_lr == names["found"].lrs[-1] / 10


def test_the_gradient_noise(capsys):
    model = nn.Linear(3, 2)
    names = {
        **{"model": model, "criterion": nn.CrossEntropyLoss(), "GradientNoise": GradientNoise},
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "batches": [(torch.randn(64, 3), torch.zeros(64, dtype=torch.long)) for _ in range(3)],
    }
    exec(snippet("own-code.md", "GradientNoise"), names)
    assert "NoiseScale(noise_scale=" in capsys.readouterr().out
    assert names["noise"].estimate().steps == 3


@pytest.mark.parametrize("name", ["loop", "precision", "ranks"])
def test_muon(name, capsys):
    """After the imports of the first snippet, in a training loop of two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4), nn.Linear(4, 3))
    names = {"model": model, "nn": nn, "device": "cpu"}
    lines = snippet("muon.md", "loop").splitlines()
    imports = "\n".join(line for line in lines if "import" in line)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        exec(imports + "\n" + snippet("muon.md", name), names)
        optimizer, weights = names["optimizer"], [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
            optimizer.step()
        shared = optimizer.process_group is dist.group.WORLD
    finally:
        dist.destroy_process_group()
    assert not any(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    groups = [group for group in optimizer.param_groups if group["orthogonal"]]
    assert [group["param_names"] for group in groups] == [["2.weight"]]
    assert shared == (name == "ranks")
    assert optimizer.master_weights == (name == "precision")
    assert name != "loop" or "orthogonal" in capsys.readouterr().out
