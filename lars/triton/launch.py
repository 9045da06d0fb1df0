"""Whether Triton can launch a kernel: torch's wheels bring it without the C compiler that it needs.

Where that or Python.h is missing, the first launch of a process fails, and so must not be part of a
step.
"""

from __future__ import annotations

import subprocess
from textwrap import shorten

import torch

from .. import capture
from ..reference import Hyper
from . import step

_errors: dict[torch.device, str | None] = {}


def triton_launch_error(device: torch.device) -> str | None:
    """Return why Triton launches no kernel on a device, in one line, or None if it does."""
    if not step.runs_on(device):
        return "it needs a CUDA device and the package triton"
    if device.type == "cpu":
        return None
    if device not in _errors:  # errors of the device itself are raised
        capture.refuse(device, "has not tried to launch a Triton kernel")
        _errors[device] = _error_of_first_launch(device)
    return _errors[device]


def _error_of_first_launch(device: torch.device) -> str | None:
    try:
        _launch(device)
    except Exception as error:
        if not _is_of_building(error):
            raise
        hint = "; is Python.h missing?" if isinstance(error, subprocess.CalledProcessError) else ""
        return shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...") + hint
    return None


def _launch(device: torch.device) -> None:
    weight, gradient, buffer = torch.ones(3, 4, device=device).unbind()
    hyper = Hyper(0.0, 0.9, 0.0, 1e-3, 0.0, nesterov=False, trust_clip=False, adapt=True)
    step.update("mlperf", [weight], [gradient], [buffer], hyper)


def _is_of_building(error: Exception) -> bool:
    """Whether an error is of building or loading a kernel or its launcher, not of the device."""
    # Triton 3.9 raises RuntimeError without a compiler or driver, AssertionError without libcuda,
    # errors of Python and, where a kernel does not compile, of its own.
    if type(error) is RuntimeError:
        return not str(error).startswith(("Triton Error", "CUDA error", "HIP error"))
    of_python = OSError, subprocess.SubprocessError, ImportError, AssertionError
    return isinstance(error, of_python) or type(error).__module__.startswith("triton.")
