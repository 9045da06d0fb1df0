"""Small models whose gradients are known, for the tests of GradientNoise."""

import torch
import torch.nn.functional as F
from torch import nn


def network(norm=None):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 2), norm or nn.Identity(), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4)]
    return nn.Sequential(*layers).double()


def examples(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, 3, 3, dtype=torch.float64, generator=generator)
    return images, torch.randint(4, (count,), generator=generator)


def measured(noise, model, batches):
    """Measure one step whose backward passes are of ``batches``."""
    for images, labels in batches:
        (F.cross_entropy(model(images), labels) / len(batches)).backward()
    noise.step()
    model.zero_grad()


def moments(gradients, unbiased):
    """|mean|² and the total variance of gradients, shape ``[n, parameters]``."""
    return gradients.mean(0).square().sum().item(), gradients.var(0, unbiased).sum().item()


def flat(gradients):
    return torch.cat([g.flatten(1) for g in gradients], 1)


class Weights(nn.Module):
    """Parameters whose gradient by ``model(x).mean()`` is the mean of x, shape ``[n, 3]``."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, dtype=dtype))
        self.b = nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, x):
        return x[:, :2] @ self.a + x[:, 2] * self.b


def pass_of(model, x, factor=1.0):
    (factor * model(x).mean()).backward()
