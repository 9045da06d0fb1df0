"""The machine that a part runs on: its device, installed packages and versions."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import largebatch
from benchmarks.gpu.report import Skipped

#: Packages that the trainer needs besides torch.
TRAINER = ("timm", "pydantic", "yaml", "rich", "tensorboard")

_PACKAGES = ("torch", "triton", "timm", "nvidia-dali-cuda130", "nvidia-dali-cuda120")


@dataclass(frozen=True)
class Place:
    """The device and options of a run."""

    device: torch.device  # the device to measure
    dry: bool = False  # whether to use small shapes and few repeats, only to test the harness
    cifar10: Path | None = None  # folder or archive with train/, and test/ or val/
    call: str = "c"  # the call that the part belongs to

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a CUDA GPU."""
        return self.device.type == "cuda"


def need(*modules: str) -> None:
    """Check that ``modules`` can be imported."""
    missing = [module for module in modules if not installed(module)]
    if missing:
        raise Skipped(f"needs {', '.join(missing)}")


def need_cuda(device: torch.device) -> None:
    """Check that ``device`` is a CUDA GPU."""
    if device.type != "cuda":
        raise Skipped("needs CUDA")


def installed(module: str) -> bool:
    """Whether ``module`` can be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # its parent is missing, or it is blocked
        return False


def about(dry: bool) -> dict[str, Any]:
    """Return the device, machine, package versions and date for the results."""
    machine: dict[str, Any] = {"device": "cpu", "cores": f"{len(os.sched_getaffinity(0))} cores"}
    versions: dict[str, Any] = {
        "python": platform.python_version(),
        "largebatch": largebatch.__version__,
    }
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    if not dry:
        properties = torch.cuda.get_device_properties(0)
        machine |= {"device": properties.name, "driver": f"driver {_driver()}"}
        machine |= {"memory": f"{properties.total_memory / 2**30:.0f} GiB"}
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        if torch.distributed.is_nccl_available():
            versions["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return {"date": date.today().isoformat(), "machine": machine, "versions": versions}


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return lines.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
