"""Loss, top-1 and top-5 of a meter are those of their definitions."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from largebatch.recipes.ranks import Job
from largebatch.recipes.training.evaluate import Meter

JOB = Job(0, 1, 1, torch.device("cpu"))


@pytest.mark.parametrize("classes", [3, 5, 20])
def test_a_meter_counts_the_first_and_the_first_five(classes):
    generator = torch.Generator().manual_seed(classes)
    meter = Meter(JOB.device)
    logits = [torch.randn(n, classes, generator=generator) for n in (7, 1, 32)]
    labels = [torch.randint(classes, (len(x),), generator=generator) for x in logits]
    for x, y in zip(logits, labels, strict=True):
        meter.add(F.cross_entropy(x, y), x, y)
    values, count = meter.read(JOB)
    x, y = np.concatenate(logits), np.concatenate(labels)
    above = (x > x[np.arange(40), y][:, None]).sum(1)  # classes ranked above the correct one
    assert count == 40
    assert values["top1"] == pytest.approx(100 * (above < 1).mean())
    assert values["top5"] == pytest.approx(100 * (above < 5).mean())
    assert (values["top5"] == 100) == (classes <= 5)
    probability = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    assert values["loss"] == pytest.approx(-np.log(probability[np.arange(40), y]).mean(), rel=1e-5)
    meter.add(torch.tensor(2.0), logits[1], labels[1])
    assert meter.read(JOB)[1] == 1  # reading starts over
