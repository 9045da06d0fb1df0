"""The optimizers in one file take the steps of largebatch.lars."""

import importlib.util
from itertools import cycle
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from largebatch.lars import LARS, Muon, as_scheduler, polynomial, split_parameters

pytestmark = pytest.mark.slow("trains small networks for 40 steps, each twice")

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = {
    "depthwise": lambda: nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, groups=8)),
        *(nn.ReLU(), nn.Conv2d(8, 12, 1), nn.BatchNorm2d(12), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(12, 10)),
    ),
    "shared": lambda: Shared(),
    "test_resnet": lambda: timm.create_model("test_resnet", num_classes=10),
    "test_vit": lambda: timm.create_model("test_vit", num_classes=10, img_size=16),
}


class Shared(nn.Module):
    """Uses a weight twice."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3 * 16 * 16, 8), nn.Linear(8, 10)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight

    def forward(self, images):
        hidden = torch.tanh(self.one(torch.tanh(self.first(images.flatten(1)))))
        return self.last(torch.tanh(self.two(hidden)))


def module_of(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(name, make_optimizer, lr, steps):
    """The parameters after so many steps in FP64, with a learning rate that falls to 0."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    images, labels = torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.arange(4)
    optimizer = make_optimizer(model)
    scheduler = as_scheduler(optimizer, polynomial(lr, steps, warmup_steps=10))
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return dict(model.named_parameters())


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "dialect"), [*zip(MODELS, cycle(["mlperf", "torch"]), strict=False)]
)
def test_lars_in_one_file(name, dialect):
    file = module_of("lars_in_one_file")
    options = {"lr": 0.2, "trust_coefficient": 0.01, "dialect": dialect}
    ours = trained(name, lambda m: file.LARS(file.groups(m, 1e-3), **options), 0.2, 40)
    theirs = trained(name, lambda m: LARS(split_parameters(m, 1e-3), **options), 0.2, 40)
    assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["depthwise", "shared", "test_resnet"])
def test_muon_in_one_file(name):
    file = module_of("muon_in_one_file")

    def theirs(model):
        groups = file.groups(model, 1e-2)
        own = ("params", "weight_decay", "orthogonal")
        groups = [{key: group[key] for key in own} for group in groups if group["params"]]
        return Muon(groups, 0.02, momentum=0.95, others={"rule": "sgd", "lr_scale": 3.0})

    ours = trained(name, lambda m: file.Muon(file.groups(m, 1e-2, sgd_scale=3.0), 0.02), 0.02, 40)
    assert_close(ours, trained(name, theirs, 0.02, 40))


def test_the_files_need_torch_alone():
    for path in EXAMPLES.glob("*_in_one_file.py"):
        lines = path.read_text().splitlines()
        imported = (line.split()[1] for line in lines if line.startswith(("import", "from")))
        rooms = {module.partition(".")[0] for module in imported}
        assert rooms <= {"collections", "math", "torch", "typing"}
