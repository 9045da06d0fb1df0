"""What a run sets for its device: the memory format, cuDNN's benchmark and TF32.

On CUDA, tensor cores want images and weights in channels-last: cuDNN transposes others around each
convolution (NVIDIA, "Convolutional Layers User's Guide", tensor layouts). cuDNN's benchmark tries
every algorithm for each new shape and pays where shapes stay: a run has one for each stage and one
for evaluation, where incomplete batches are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..schema.recipe import Recipe

T = TypeVar("T")


@dataclass(frozen=True)
class DeviceSettings:
    """The settings of a run on one device.

    Attributes:
        channels_last: Whether images and weights are in the channels-last memory format.
        cudnn_benchmark: Whether cuDNN times its algorithms; None leaves the process as it is.
        tf32: Whether FP32 products and convolutions are computed in TF32; None leaves the process
            as it is.
    """

    channels_last: bool
    cudnn_benchmark: bool | None
    tf32: bool | None

    @property
    def memory_format(self) -> torch.memory_format:
        """Memory format of images, and of weights with four dimensions."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager that sets the flags, which hold in the whole process, for its body."""
        benchmark = torch.backends.cudnn.benchmark
        if self.cudnn_benchmark is not None:
            torch.backends.cudnn.benchmark = self.cudnn_benchmark
        try:
            with _tf32(self.tf32):
                yield
        finally:
            torch.backends.cudnn.benchmark = benchmark

    def in_words(self) -> str:
        """Name the settings; empty if they are what torch does by itself.

        For example ``channels-last memory format, cuDNN benchmark on, TF32 on``.
        """
        switches = {"cuDNN benchmark": self.cudnn_benchmark, "TF32": self.tf32}
        told = [f"{n} {'on' if on else 'off'}" for n, on in switches.items() if on is not None]
        if not told and not self.channels_last:
            return ""
        memory = "channels-last" if self.channels_last else "contiguous"
        return ", ".join([f"{memory} memory format", *told])


def device_settings(recipe: Recipe, device: torch.device) -> DeviceSettings:
    """Return the settings of a recipe on a device; a function of these two alone."""
    if device.type != "cuda":
        return DeviceSettings(recipe.channels_last is True, None, None)
    # "auto" is true.
    return DeviceSettings(bool(recipe.channels_last), bool(recipe.cudnn_benchmark), recipe.tf32)


@contextmanager
def _tf32(on: bool | None) -> Iterator[None]:
    """Context manager that turns TF32 on or off in cuBLAS and cuDNN; nothing if ``on`` is None.

    torch keeps this twice: in the flags of torch 1.12, and since 2.9 by backend and operator. The
    old setters write both. The new setters write only the new flags; the getters of the old flags
    then raise, and the autotuning of torch.compile calls them in torch 2.11 (pytorch/pytorch, issue
    166387).
    """
    if on is None:
        yield
        return
    backends: Any = torch.backends  # typed as modules, without the operators that they have
    cudnn = (backends.cudnn.conv, backends.cudnn.rnn)
    operators = (backends.cuda.matmul, *cudnn, backends.mkldnn.matmul)
    by_operator = [(operator, operator.fp32_precision) for operator in operators]
    matmul = _readable(torch.get_float32_matmul_precision, "highest")
    allowed = _readable(lambda: bool(backends.cudnn.allow_tf32), True)
    torch.set_float32_matmul_precision("high" if on else "highest")
    backends.cudnn.allow_tf32 = on
    for operator in cudnn:  # the old flag, if false, leaves them to backends.fp32_precision
        operator.fp32_precision = "tf32" if on else "ieee"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        backends.cudnn.allow_tf32 = allowed
        for operator, precision in by_operator:
            operator.fp32_precision = precision


def _readable(get: Callable[[], T], default: T) -> T:
    """An old flag, or torch's default where the caller's old and new flags disagree."""
    try:
        return get()
    except RuntimeError:
        return default
