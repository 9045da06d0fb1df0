"""A small network, its batch and a training loop, shared by the tests of amp."""

import torch
from torch import nn

from largebatch.amp import PRECISIONS, MasterWeights, Precision
from largebatch.lars import LARS


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.norm2 = nn.GroupNorm(2, 8)
        self.norm3 = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 4)
        self.register_buffer("shift", torch.full((8,), 0.1))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, images):
        x = torch.relu(self.bn1(self.conv1(images)))
        x = x + torch.relu(self.norm2(self.conv2(x)))
        return self.fc(self.norm3(x.mean((2, 3)) + self.shift))


def net_and_batch(images=32):
    torch.manual_seed(0)
    labels = torch.arange(images) % 4
    x = torch.randn(images, 3, 8, 8) + labels[:, None, None, None] / 2
    return Net(), x, labels


def sgd(model, lr=0.2):
    return torch.optim.SGD(model.named_parameters(), lr, momentum=0.9)


def lars(model, lr=0.2, masters=False):
    return LARS(model.named_parameters(), lr, trust_coefficient=0.05, master_weights=masters)


def optimizer_for(precision, model, kind="lars", lr=0.2):
    if kind == "lars":
        return lars(model, lr, precision.form.masters)
    return MasterWeights(sgd(model, lr)) if precision.form.masters else sgd(model, lr)


def loss_of(precision, model, x, labels):
    with precision.forward():
        logits = model(x)
    return nn.functional.cross_entropy(logits.float(), labels)


class Loop:
    """A training loop whose loss or images can be made to overflow by a factor."""

    def __init__(self, name, kind="lars", **options):
        self.precision = Precision(name, **options)
        own, self.x, self.labels = net_and_batch()
        self.model = self.network = self.precision.convert(own)
        self.optimizer = optimizer_for(self.precision, self.model, kind, lr=0.05)

    def backward(self, loss=1.0, images=1.0):
        own = loss_of(self.precision, self.network, self.x * images, self.labels)
        self.precision.backward(own * loss)

    def update(self):
        self.precision.step(self.optimizer)
        self.optimizer.zero_grad()

    def step(self, loss=1.0, images=1.0):
        self.backward(loss, images)
        self.update()
        return self


HALF = [name for name, form in PRECISIONS.items() if form.casts_parameters]
MASTERS = [name for name, form in PRECISIONS.items() if form.masters]
