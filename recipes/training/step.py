"""One optimizer step: forward, loss and backward of its micro-batches, and the update.

The forward pass and the loss are one function, which ``compile`` compiles as one graph, so that
Inductor fuses the label-smoothed cross entropy with what surrounds it. Under
DistributedDataParallel they are two graphs: the network below the wrapper, which Dynamo splits at
DDP's buckets so that the all-reduce still overlaps with backward, and the loss. The wrapper is not
compiled: its own code breaks the graph in torch 2.11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...amp import Precision
from ...comm import ranged
from ...pipeline import Batch
from ..models.batch_counters import BatchCounters
from .evaluate import Meter
from .loss import training_loss
from .watch.clocks import BACKWARD, FORWARD, INPUT_WAIT, METERS, OPTIMIZER, Phases
from .watch.noise import NoiseMeter

#: The modes in which torch.compile replays CUDA graphs, which overwrite what they returned before.
WITH_GRAPHS = ("reduce-overhead", "max-autotune")


class TrainingStep:
    """Takes the optimizer steps of a run.

    Args:
        model: The model on its device, converted to its precision.
        ddp: Its DDP wrapper, if there are several ranks.
        optimizer: Optimizer of the model's parameters.
        precision: Precision of the model.
        label_smoothing: Share of the target that is spread over all classes.
        max_norm: Norm that the gradients of a step are clipped to; None: they are not.
        compile_mode: Mode of torch.compile, for training and evaluation; None: not compiled.
        noise: Is told when the gradients of a step are complete.

    Attributes:
        model: As given.
        optimizer: As given.
        precision: As given.
        phases: Measures and names the phases of the steps.
    """

    def __init__(
        self,
        model: nn.Module,
        ddp: DistributedDataParallel | None,
        optimizer: Optimizer,
        precision: Precision,
        *,
        label_smoothing: float = 0.0,
        max_norm: float | None = None,
        compile_mode: str | None = None,
        noise: NoiseMeter | None = None,
    ) -> None:
        self.phases = Phases(next(model.parameters()).device, model if ddp else None)
        self.model, self.optimizer, self.precision = model, optimizer, precision
        self._ddp, self._max_norm, self._noise = ddp, max_norm, noise
        self._counters = BatchCounters(model)
        network, loss_of = ddp or model, training_loss
        if compile_mode is not None:
            model.compile(mode=compile_mode, dynamic=False)  # for evaluation too
            if ddp is not None:
                loss_of = torch.compile(training_loss, mode=compile_mode, dynamic=False)

        def forward(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            logits = network(images)
            return loss_of(logits, labels, label_smoothing), logits

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
        stops: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Take a step on the next ``accumulation`` micro-batches.

        Args:
            batches: The micro-batches.
            accumulation: Number of micro-batches of the step.
            meter: Is given their losses and logits, and the norm of the gradients.
            waits: Whether to wait for the device, to look whether too many steps were skipped.
            stops: Is asked between two micro-batches whether to drop the step. On several ranks,
                its answer must be False.

        Returns:
            Whether the step was made. One that was dropped has changed nothing but the place in
            ``batches``.

        Raises:
            GradientOverflowError: Too many steps in a row were skipped.
        """
        phases = self.phases
        buffers: list[Tensor] = []
        if self._ddp is None and accumulation > 1:  # of batch norm, which counts each micro-batch
            buffers = [buffer.clone() for buffer in self.model.buffers()]
        with phases.step():
            for place in range(accumulation):
                with phases(INPUT_WAIT):
                    images, labels = next(batches)
                loss, logits = self.forward_backward(images, labels, place, accumulation)
                if self._ddp is not None and place == accumulation - 1:
                    phases.backward_returned()
                with ranged(METERS):
                    meter.add(loss, logits, labels)
                if place < accumulation - 1 and stops():
                    self._drop(buffers)
                    meter.drop_step()
                    return False
            if self._noise is not None:
                with ranged(METERS):
                    self._noise.gradients_ready()
            with phases(OPTIMIZER):
                norm = self.update()
            with ranged(METERS):
                if norm is not None:
                    meter.add_gradient_norm(norm)
                if waits:
                    self.precision.check_skipped()  # it names layers by their gradients
            with phases(OPTIMIZER):
                self.optimizer.zero_grad(set_to_none=True)
        return True

    @torch.no_grad()
    def _drop(self, buffers: list[Tensor]) -> None:
        """Drop the gradients of a step, and give the model the buffers that it had before."""
        self.optimizer.zero_grad(set_to_none=True)
        for buffer, value in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(value)

    def forward_backward(
        self, images: Tensor, labels: Tensor, place: int, accumulation: int
    ) -> tuple[Tensor, Tensor]:
        """Add the gradients of a micro-batch.

        Args:
            images: Images, shape ``[n, 3, size, size]``.
            labels: Class numbers, int64, shape ``[n]``.
            place: Which of the step's micro-batches this is, from 0.
            accumulation: Number of micro-batches of the step.

        Returns:
            The mean loss, 0-d, and the logits, shape ``[n, classes]``, both without a graph. The
            next call may overwrite them.
        """
        if self._overwrites:
            torch.compiler.cudagraph_mark_step_begin()
        reduces = self._ddp is None or place == accumulation - 1
        with nullcontext() if reduces or self._ddp is None else self._ddp.no_sync():
            with self.phases(FORWARD), self._counters.together(), self.precision.forward():
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
        """Clip the gradients, if asked, and step the optimizer.

        Returns:
            The norm of the gradients before clipping, 0-d; None without clipping.
        """
        norm = None
        if self._max_norm is not None:
            norm = self.precision.clip_grad_norm_(self.optimizer, self._max_norm)
        self.precision.step(self.optimizer)
        return norm
