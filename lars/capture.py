"""Whether a step is being captured into a CUDA graph, which replays what is launched on the device.

What Python does in a capture happens once, for all replays.
"""

from __future__ import annotations

import torch


def captures(device: torch.device) -> bool:
    """Whether work launched on ``device`` now is being captured."""
    if torch.compiler.is_compiling() or device.type != "cuda":
        return False
    return torch.cuda.is_current_stream_capturing()


def refuse(device: torch.device, problem: str) -> None:
    """Raise RuntimeError during a capture: what a first step creates must exist before."""
    if captures(device):
        raise RuntimeError(f"the optimizer {problem} yet; valid: take a step before the capture")
