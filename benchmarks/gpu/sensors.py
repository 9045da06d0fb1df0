"""Clocks, power and temperature of the GPU while something is measured; nothing is ever set."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Sample = dict[str, float]

_INTERVAL_SECONDS = 0.25
_QUERY = {
    "clocks.sm": "SM_MHz",
    "clocks.mem": "memory_MHz",
    "power.draw": "watts",
    "temperature.gpu": "celsius",
}


class Sensors:
    """Samples the sensors of GPU 0 in a thread, by NVML or else by nvidia-smi.

    Args:
        read: returns one sample; None finds out how.
    """

    def __init__(self, read: Callable[[], Sample] | None = None) -> None:
        self._read = read or _reader()
        self._samples: list[tuple[float, Sample]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sensors:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(2)

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            with suppress(Exception):  # a missing sample only leaves a cell empty
                sample = self._read()
                if sample:
                    self._samples.append((time.monotonic(), sample))

    def between(self, spans: list[tuple[float, float]]) -> Sample:
        """Return the medians of the samples within ``spans`` of ``time.monotonic``, by column."""
        found = [s for at, s in self._samples if any(a <= at <= b for a, b in spans)]
        keys = list(dict.fromkeys(key for sample in found for key in sample))
        return {k: statistics.median(s[k] for s in found if k in s) for k in keys}


def _reader() -> Callable[[], Sample]:
    try:
        return _nvml()
    except Exception:  # no package, no driver, or no permission
        return _nvidia_smi


def _nvml() -> Callable[[], Sample]:
    import pynvml  # type: ignore[import-not-found]

    pynvml.nvmlInit()
    gpu: Any = pynvml.nvmlDeviceGetHandleByIndex(0)

    def read() -> Sample:
        return {
            "SM_MHz": float(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)),
            "memory_MHz": float(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM)),
            "watts": pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            "celsius": float(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)),
        }

    read()
    return read


def _nvidia_smi() -> Sample:
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(_QUERY)}"]
    command.append("--format=csv,noheader,nounits")
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return {}
    return parsed(found.stdout)


def parsed(line: str) -> Sample:
    """Read a line of nvidia-smi; a sensor that says ``[N/A]`` is left out."""
    sample = {}
    for name, text in zip(_QUERY.values(), line.splitlines()[0].split(","), strict=True):
        with suppress(ValueError):
            sample[name] = float(text)
    return sample
