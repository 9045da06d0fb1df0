"""A copy to the CPU is waited for: one that is not may be read before it has arrived."""

import pytest
import torch

from largebatch.amp import gradients
from largebatch.lars import memory


class OnDevice:
    """A tensor on a GPU that notes how it is copied."""

    def to(self, device, *, non_blocking):
        return device.type, non_blocking


@pytest.mark.parametrize("moved", [memory.moved, gradients.moved])
def test_the_host_waits_for_what_it_can_read(moved):
    assert moved(OnDevice(), torch.device("cpu")) == ("cpu", False)
    assert moved(OnDevice(), torch.device("cuda", 1)) == ("cuda", True)
