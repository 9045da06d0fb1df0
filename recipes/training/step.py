"""One optimizer step: forward, loss and backward of its micro-batches, and the update.

The forward pass and the loss are one function, which ``compile`` compiles as one graph, so that
Inductor fuses the label-smoothed cross entropy with what surrounds it. Under
DistributedDataParallel they are two graphs: the network below the wrapper, which Dynamo splits at
DDP's buckets so that the all-reduce still overlaps with backward, and the loss. The wrapper is not
compiled: its own code breaks the graph in torch 2.11.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...amp import Precision
from ...comm import Plan, Topology, ranged, register
from ...lars import GradientNoise
from ...pipeline import Batch, Loader
from ..ranks import Job
from .evaluate import Meter, kept
from .targets import training_loss
from .watch.clocks import BACKWARD, FORWARD, INPUT_WAIT, METERS, OPTIMIZER, Phases

#: The modes in which torch.compile replays CUDA graphs, which overwrite what they returned before.
WITH_GRAPHS = ("reduce-overhead", "max-autotune")


class TrainingStep:
    """Takes the optimizer steps of a run."""

    def __init__(
        self,
        model: nn.Module,
        ddp: DistributedDataParallel | None,
        optimizer: Optimizer,
        precision: Precision,
        *,
        loss: Callable[[Tensor, Tensor], Tensor] = training_loss,
        mix: Callable[[Tensor, Tensor], Batch] | None = None,
        max_norm: float | None = None,
        compile_mode: str | None = None,
        noise: GradientNoise | None = None,
    ) -> None:
        self.phases = Phases(next(model.parameters()).device, model if ddp else None)
        self.model, self.optimizer, self.precision = model, optimizer, precision
        self._ddp, self._max_norm, self._noise = ddp, max_norm, noise
        self.mix = mix or Batch
        network, loss_of = ddp or model, loss
        if compile_mode is not None:
            model.compile(mode=compile_mode, dynamic=False)  # for evaluation too
            if ddp is not None:
                loss_of = torch.compile(lambda *pair: loss(*pair), mode=compile_mode, dynamic=False)

        def forward(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            logits = network(images)
            return loss_of(logits, labels), logits

        self._forward = forward
        if compile_mode is not None and ddp is None:
            self._forward = torch.compile(forward, mode=compile_mode, dynamic=False)
        self._overwrites = compile_mode in WITH_GRAPHS

    def __call__(
        self,
        batches: Iterator[Batch],
        accumulation: int,
        meter: Meter,
        *,
        waits: bool = False,
    ) -> None:
        """Take a step on the next ``accumulation`` micro-batches.

        With ``waits``, the host looks whether too many steps were skipped.
        """
        phases = self.phases
        with phases.step():
            for place in range(accumulation):
                with phases(INPUT_WAIT):
                    batch = next(batches)
                images, labels = self.mix(*batch)
                loss, logits = self.forward_backward(images, labels, place, accumulation)
                if place == accumulation - 1:
                    phases.backward_returned()
                with ranged(METERS):
                    meter.add(loss, logits, labels)
            if self._noise is not None:
                with ranged(METERS):
                    self._noise.step(self.precision.loss_scale_on_device)
            with phases(OPTIMIZER):
                norm = self.update()
            with ranged(METERS):
                if norm is not None:
                    meter.add_gradient_norm(norm)
                if waits:
                    self.precision.check_skipped()  # it names layers by their gradients
            with phases(OPTIMIZER):
                self.optimizer.zero_grad(set_to_none=True)

    def forward_backward(
        self, images: Tensor, labels: Tensor, place: int, accumulation: int
    ) -> tuple[Tensor, Tensor]:
        """Add the gradients of micro-batch ``place``, from 0, of the ``accumulation`` of a step.

        Returns the mean loss, 0-d, and the logits, ``[n, classes]``, without a graph; the next call
        may overwrite them.
        """
        if self._overwrites:
            torch.compiler.cudagraph_mark_step_begin()
        ddp, is_last = self._ddp, place == accumulation - 1
        with nullcontext() if ddp is None or is_last else ddp.no_sync():
            with self.phases(FORWARD), self.precision.forward():
                loss, logits = self._forward(images, labels)
            with self.phases(BACKWARD):
                self.precision.backward(loss / accumulation)
        if self._overwrites and place == 0 and accumulation > 1:
            # They are in the memory of the compiled backward pass, which the next one overwrites.
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        return loss.detach(), logits.detach()

    def update(self) -> Tensor | None:
        """Step the optimizer; return the norm that gradients had, 0-d, if they are clipped."""
        norm = None
        if self._max_norm is not None:
            norm = self.precision.clip_grad_norm_(self.optimizer, self._max_norm)
        self.precision.step(self.optimizer)
        return norm


def data_parallel(
    model: nn.Module, job: Job, plan: Plan, topology: Topology
) -> DistributedDataParallel:
    """Wrap a model, on this rank's device, in DDP that reduces gradients by a plan."""
    # Buffers are averaged before each evaluation instead of broadcast at each forward pass.
    # torch 2.15 renamed the option.
    names = inspect.signature(DistributedDataParallel).parameters
    option = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    ddp = DistributedDataParallel(
        model,
        device_ids=[job.device] if job.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **plan.ddp_options(),
        **{option: False},  # type: ignore[arg-type]
    )
    register(ddp, plan, topology)
    return ddp


def lay_out_buckets(ddp: DistributedDataParallel, step: TrainingStep, loader: Loader) -> None:
    """Train a micro-batch of zeros without an update, so that DDP fixes its buckets beforehand."""
    # DDP rebuilds its buckets after its first backward pass, in the order in which gradients became
    # ready, which changes the order of summation: a resumed run would do so at another step.
    images, labels = (part.zero_() for part in loader.empty_batch())
    last = loader.accumulation - 1  # the micro-batch whose backward pass reduces
    with kept(ddp.module.buffers()):
        step.forward_backward(*step.mix(images, labels), last, loader.accumulation)
    step.optimizer.zero_grad(set_to_none=True)
    step.precision.abandon()
