"""The gradient noise scale of a training run, from gradients that the run computes anyway.

McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1. The expected squared norm of the mean
gradient of B examples is |G|² + tr(Σ) / B, where G is the gradient of the whole distribution and Σ
the covariance of the gradients of single examples. Two batch sizes give both terms without bias.
Here the small batch is that of one backward pass on one rank, and the large one that of the whole
step, over all passes and ranks. Their ratio B_simple = tr(Σ) / |G|² says about how large a batch
may be before most of its examples are wasted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .memory import moved
from .sharding import is_flattened_by_fsdp1, layout_of


@dataclass(frozen=True)
class NoiseScale:
    """An estimate of the gradient noise scale over several steps.

    Attributes:
        noise_scale: ``trace / gradient_norm2``, in examples. NaN if ``gradient_norm2`` is not
            positive: the noise is too large for so few steps.
        standard_error: Standard error of ``noise_scale``, in examples. NaN below two steps. From
            about a third of ``noise_scale`` on, the estimate is no more than an order of magnitude.
        gradient_norm2: Mean estimate of the squared norm of the gradient without noise.
        trace: Mean estimate of tr(Σ), the total variance of the gradient of one example.
        steps: Number of steps that it is from.
        left_out: Number of steps whose gradients were not finite.
    """

    noise_scale: float
    standard_error: float
    gradient_norm2: float
    trace: float
    steps: int
    left_out: int


class GradientNoise:
    """Measures the gradient noise scale in a training loop.

    Hooks see the gradient of each backward pass on this rank; :meth:`step` compares them with the
    final ``.grad``. Neither waits for the device or communicates; gradients stay as they are. A
    step needs two backward passes, on one rank by accumulation or on two ranks.

    Args:
        params: The parameters that the loss is differentiated by.
        batch_size: Examples of one backward pass on one rank. Assign to the attribute of this name
            where it changes.
        window: Number of measured steps that :meth:`estimate` is over: the last ones.

    Raises:
        ValueError: An argument is invalid, or a parameter is sharded over ranks (FSDP), so that no
            rank has the gradient of its own examples.

    Example::

        noise = GradientNoise(model.parameters(), batch_size=32)
        for step in range(steps):
            noise.watch(step % 10 == 0)  # the other steps cost nothing
            for images, labels in micro_batches(step):
                criterion(model(images), labels).backward()
            noise.step()  # before gradients are unscaled, clipped or used
            optimizer.step()
            optimizer.zero_grad()
        print(noise.estimate())

    Each pass is the mean loss of ``batch_size`` examples of their own, or the same multiple of it
    in all passes: ``noise_scale`` does not depend on it, ``gradient_norm2`` and ``trace`` do. With
    SyncBatchNorm or gradient compression the estimate is not exact. docs/concepts/gradient-noise.md
    says what it means with batch norm and for examples drawn without replacement.
    """

    def __init__(self, params: Iterable[Tensor], batch_size: int, *, window: int = 100) -> None:
        self._parameters = list(dict.fromkeys(params))  # each once
        if not self._parameters:
            raise ValueError("params is empty; pass parameters, such as model.parameters()")
        if any(layout_of(p) is not None or is_flattened_by_fsdp1(p) for p in self._parameters):
            raise ValueError(
                "params are sharded over ranks, none of which has the gradient of its own examples;"
                " valid: DistributedDataParallel, or one process"
            )
        for name, value, least in (("batch_size", batch_size, 1), ("window", window, 2)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value!r}")
        self.batch_size = batch_size
        self._device = self._parameters[0].device
        # Ring buffer of the estimates of |G|² and tr(Σ) of the last steps, on the device.
        self._rows = torch.zeros(window, 2, dtype=torch.float64, device=self._device)
        self._measured = 0
        self._handles: list[RemovableHandle] = []
        self._forget()
        self.watch()

    def watch(self, on: bool = True) -> None:
        """Measure the steps from here on, or do not (``on``): then there are no hooks.

        Call it between steps, on all ranks alike: an unfinished step is forgotten.
        """
        self._forget()
        if on and not self._handles:
            self._handles = [
                parameter.register_hook(partial(self._see, index))
                for index, parameter in enumerate(self._parameters)
                if parameter.requires_grad
            ]
        elif not on:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    @torch.no_grad()
    def step(self, scale: Tensor | float = 1.0) -> None:
        """Measure the step whose backward passes are done; nothing if it was not watched.

        Call it before anything changes ``.grad``: before gradients are unscaled or clipped, and
        before the optimizer's step. A step whose gradients are not finite is left out.

        Args:
            scale: Loss scale of the step, a number or 0-d on the device of the parameters.

        Raises:
            RuntimeError: There was no backward pass, or only one on the only rank. Nothing is
                measured then.
        """
        if not self._handles:
            return
        passes, norms = max(self._passes), self._norms
        self._forget()
        gradients = [p.grad for p in self._parameters if p.requires_grad and p.grad is not None]
        if not passes or not gradients:
            raise RuntimeError(
                "no backward pass has given the parameters gradients since the last step; valid: "
                "call step after backward and before zero_grad, on the parameters that are trained"
            )
        batches = passes * _ranks()
        if batches < 2:
            raise RuntimeError(
                "a step of one backward pass on one rank has no smaller batch to compare with; "
                "valid: two or more, by accumulation or on several ranks"
            )
        # Each pass contributes 1 / passes of its gradient to the mean over them.
        small = passes * self._sum_of_squares(norms)
        large = self._sum_of_squares(_norms(gradients))
        norm2 = (batches * large - small) / (batches - 1)
        trace = self.batch_size * batches / (batches - 1) * (small - large)
        scale = scale.double() if isinstance(scale, Tensor) else scale  # or scale**2 overflows
        self._rows[self._measured % len(self._rows)] = torch.stack([norm2, trace]) / scale**2
        self._measured += 1

    def estimate(self) -> NoiseScale:
        """Return the estimate over the last steps that were measured; waits for the device.

        It is the ratio of the means over these steps, with a standard error by the delta method,
        which takes their errors as independent. A collective of a few kilobytes where there are
        several ranks, with the same result on all.
        """
        rows = self._rows[: min(self._measured, len(self._rows))].clone()
        ranks = _ranks()
        if ranks > 1 and len(rows):
            dist.all_reduce(rows)
        return _estimate((rows / ranks).cpu())

    def _see(self, index: int, gradient: Tensor) -> None:
        """Note the gradient of one backward pass; a hook of the parameter."""
        if gradient.layout != torch.strided:
            raise ValueError("GradientNoise takes no sparse gradients; valid: sparse=False")
        self._passes[index] += 1
        with torch.no_grad():
            norm: Tensor = torch.linalg.vector_norm(gradient, dtype=_wide(gradient))
            self._norms.append(norm)

    def _forget(self) -> None:
        self._passes = [0] * len(self._parameters)
        self._norms: list[Tensor] = []

    def _sum_of_squares(self, norms: list[Tensor]) -> Tensor:
        """Sum the squares of norms, in FP64, on the device of the rows."""
        sums = [torch.stack(group).double().square().sum() for group in _alike(norms)]
        return torch.stack([moved(part, self._device) for part in sums]).sum()


def _ranks() -> int:
    """Return the number of ranks over which gradients are averaged: all there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """Return the norms of gradients by few operators, grouped by device and dtype."""
    groups = _alike(gradients)
    return [n for group in groups for n in torch._foreach_norm(group, 2, dtype=_wide(group[0]))]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def _alike(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Group tensors by device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return list(groups.values())


def _estimate(rows: Tensor) -> NoiseScale:
    """Return the ratio of means of |G|² and tr(Σ), shape ``[steps, 2]`` on the CPU."""
    finite = rows[rows.isfinite().all(1)]
    steps, left_out = len(finite), len(rows) - len(finite)
    if not steps:
        return NoiseScale(math.nan, math.nan, math.nan, math.nan, 0, left_out)
    norm2, trace = finite.mean(0).tolist()
    ratio = error = math.nan
    if norm2 > 0:
        ratio = trace / norm2
        residuals = finite[:, 1] - ratio * finite[:, 0]
        if steps > 1:
            variance = residuals.square().sum().item() / (steps - 1)
            error = math.sqrt(variance / steps) / norm2
    return NoiseScale(ratio, error, norm2, trace, steps, left_out)
