"""What a run uses of its device: memory, and the utilisation and power of a GPU.

Utilisation and power are read by torch's own functions, which find the GPU by CUDA_VISIBLE_DEVICES,
given by numbers or UUIDs, and ask NVIDIA's management library. They need the package
``nvidia-ml-py``; without it, or where the driver does not tell, they are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

#: The metrics of a reading, in the order of :meth:`Usage.read`.
NAMES = ("memory_bytes", "gpu_utilisation", "gpu_power_watts")
_UNKNOWN = -1.0


class Usage:
    """Reads what this process uses of its device, without waiting for it.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sensors: dict[str, Callable[[], float]] = {}
        if device.type == "cuda" and torch.version.cuda:
            self._sensors = {
                "gpu_utilisation": lambda: torch.cuda.utilization(device),
                "gpu_power_watts": lambda: torch.cuda.power_draw(device) / 1000,
            }

    def read(self) -> list[float]:
        """Return a number for each of :data:`NAMES`, of which a larger one is more; -1: unknown.

        Memory on a GPU is the most that torch had allocated since the last call, in bytes, and on a
        CPU the largest resident size of the process so far, which Linux does not forget.
        Utilisation is the percentage of the last second or less in which a kernel ran.
        """
        if self._device.type == "cuda":
            memory = float(torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            memory = _largest_resident_bytes()
        return [memory, *(self._sensor(name) for name in NAMES[1:])]

    def _sensor(self, name: str) -> float:
        if name not in self._sensors:
            return _UNKNOWN
        try:
            return float(self._sensors[name]())
        except Exception:  # of pynvml or for want of it; a run does not end for it
            del self._sensors[name]
            return _UNKNOWN


def metrics_of(largest: Sequence[float]) -> dict[str, float]:
    """Return the metrics of a reading.

    Args:
        largest: Of each number of :meth:`Usage.read`, the largest on any rank.
    """
    return {name: n for name, n in zip(NAMES, largest, strict=True) if n != _UNKNOWN}


@dataclass(frozen=True)
class Capacity:
    """A device and its memory.

    Attributes:
        name: Name of the device.
        bytes: Its memory.
    """

    name: str
    bytes: int


def capacity_of(device: torch.device) -> Capacity | None:
    """Return the memory of a GPU; None for another device."""
    if device.type != "cuda":
        return None
    about = torch.cuda.get_device_properties(device)
    return Capacity(about.name, int(about.total_memory))


def _largest_resident_bytes() -> float:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return _UNKNOWN
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return 1024.0 * int(found[1]) if found else _UNKNOWN
