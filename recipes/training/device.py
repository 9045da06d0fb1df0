"""What a run sets for its device: memory format, cuDNN's benchmark, TF32, and torch.compile.

On CUDA, tensor cores want images and weights in channels-last: cuDNN transposes others around each
convolution (NVIDIA, "Convolutional Layers User's Guide", tensor layouts). cuDNN's benchmark tries
every algorithm for each new shape and pays where shapes stay: a run has one for each stage and one
for evaluation, where incomplete batches are padded.

Compiled kernels round differently, so ``compile: auto`` is settled once for a run: from the length
of the whole run, by all ranks together, and kept in its recipe and its checkpoints. A part of a run
that resumes computes as the first part did.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...pipeline import Loader, StageTimeline
from ..models.norm_layers import SharedBatchNorm
from ..ranks import Job
from ..schema.recipe import Recipe

#: Types of the devices on which ``auto`` compiles.
DEVICES = ("cuda",)

#: Forward and backward passes of a rank in the whole run from which ``auto`` compiles. Compiling
#: ResNet-50 for training and evaluation takes about a minute; on an H200, a pass of 256 images is
#: predicted to be 7 ms shorter then, and one of 32 images 3 ms.
LEAST_PASSES = 10_000


@dataclass(frozen=True)
class DeviceSettings:
    """The settings of a run on one device; None leaves the process as it is."""

    channels_last: bool  # the memory format of images and weights
    cudnn_benchmark: bool | None  # whether cuDNN times its algorithms
    tf32: bool | None  # whether FP32 products and convolutions are computed in TF32

    @property
    def memory_format(self) -> torch.memory_format:
        """Memory format of images, and of weights with four dimensions."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def apply(self) -> None:
        """Set the flags, which hold in the whole process from here on."""
        backends: Any = torch.backends  # typed as modules, without the operators that they have
        if self.cudnn_benchmark is not None:
            backends.cudnn.benchmark = self.cudnn_benchmark
        if self.tf32 is not None:
            # The flags of torch 1.12, which also write those by backend and operator of torch 2.9.
            # After the new ones, the old ones cannot be read, and torch.compile reads them in torch
            # 2.11 (pytorch/pytorch, issue 166387).
            torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
            backends.cudnn.allow_tf32 = self.tf32
            # The old flag, if false, leaves them to backends.fp32_precision.
            for operator in (backends.cudnn.conv, backends.cudnn.rnn):
                operator.fp32_precision = "tf32" if self.tf32 else "ieee"

    def in_words(self) -> str:
        """Name the settings; empty if they are what torch does by itself."""
        switches = {"cuDNN benchmark": self.cudnn_benchmark, "TF32": self.tf32}
        told = [f"{n} {'on' if on else 'off'}" for n, on in switches.items() if on is not None]
        if not told and not self.channels_last:
            return ""
        memory = "channels-last" if self.channels_last else "contiguous"
        return ", ".join([f"{memory} memory format", *told])


def device_settings(recipe: Recipe, device: torch.device) -> DeviceSettings:
    """Return the settings of a recipe on a device."""
    if device.type != "cuda":
        return DeviceSettings(recipe.channels_last is True, None, None)
    # "auto" is true
    return DeviceSettings(bool(recipe.channels_last), bool(recipe.cudnn_benchmark), recipe.tf32)


# --- torch.compile ---------------------------------------------------------------------------


def settle(
    asked: bool | str,
    saved: bool | str | None,
    timeline: StageTimeline,
    model: nn.Module,
    loader: Loader,
    job: Job,
) -> tuple[bool | str, str]:
    """Decide what the recipe's ``compile`` stands for, and prepare the compiler; a collective."""
    chosen = _chosen(saved, timeline, model, job.device) if asked == "auto" else asked
    if chosen:
        set_compiler(len({phase.image_size for phase in timeline.phases}), loader.cores)
    if chosen and asked == "auto":
        problems = enumerate(job.gather(why_it_cannot_compile(job.device)))
        # Of the first rank that has one.
        if found := next(((rank, problem) for rank, problem in problems if problem), None):
            where = f"rank {found[0]}: " if job.world_size > 1 else ""
            return False, f"compile: auto compiles nothing: {where}{found[1]}"
    return chosen, ""


def _chosen(
    saved: bool | str | None, timeline: StageTimeline, model: nn.Module, device: torch.device
) -> bool | str:
    """What ``auto`` stands for if the model can be compiled; the same on all ranks."""
    if device.type not in DEVICES:
        return False
    if saved is not None:
        return False if saved == "auto" else saved  # "auto": of a version without the key
    if any(isinstance(layer, (SharedBatchNorm, nn.SyncBatchNorm)) for layer in model.modules()):
        return False  # no test has shown yet that norms which communicate then compute the same
    return "default" if passes(timeline) >= LEAST_PASSES else False


def passes(timeline: StageTimeline) -> int:
    """Number of forward and backward passes of one rank in a run that ends."""
    assert timeline.end is not None
    ends = (*(phase.start for phase in timeline.phases[1:]), timeline.end)
    return sum(
        (end - phase.start) // (phase.micro_batch_size * timeline.world_size)
        for phase, end in zip(timeline.phases, ends, strict=True)
    )


def why_it_cannot_compile(device: torch.device) -> str:
    """Compile a small function; return the error in one line, or an empty string."""
    try:
        torch.compile(lambda x: x * 2 + 1, dynamic=False)(torch.ones(8, device=device))
    except Exception as error:  # of Dynamo, Inductor, Triton or the compiler
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def set_compiler(image_sizes: int, cores: int) -> None:
    """Set what torch.compile may use and keep in this process."""
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    # A graph for each size in training, and one in evaluation: past the limit it would run eagerly.
    dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * image_sizes + 2)
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        inductor.compile_threads = cores
