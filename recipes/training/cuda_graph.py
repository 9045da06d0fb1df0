"""Steps replayed from CUDA graphs: capture, a check against the eager step, and replay.

A small micro-batch may need less time on the GPU than the host needs to launch its kernels; a graph
launches them at once (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

A step has up to three graphs: forward and backward of its first micro-batch, which writes the
gradients; of the other micro-batches, which adds to them; and the update. All read and write the
same memory at each replay, and whatever Python computed during capture stays as it was:

- Images and labels are copied into tensors that the graphs read.
- The learning rate is a tensor on the device, which the schedule fills before the replay.
- The loss scale and its counts, momentum and the like change in place on the device.
- Random numbers follow ``torch.manual_seed`` as in an eager step: a replay takes the seed and the
  offset that the generator has then (Note [CUDA Graph-safe RNG states] in torch's
  CUDAGeneratorImpl.h; https://github.com/pytorch/pytorch/pull/84967).

The first steps run as usual, which creates the optimizer's state and lets cuDNN and torch.compile
choose kernels. Before the next one, its first micro-batches are computed as usual and by graphs,
neither of which changes weights or statistics; only if loss and gradients are the same, this step
and the later ones are replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...amp import Precision
from ...pipeline import Batch
from ..errors import RecipeError
from ..ranks import Job
from .capture_state import References, Snapshot, options_of, place_of, state_of
from .evaluate import Meter
from .phases import Phases
from .recorder import RECORDERS, Recorder
from .step import TrainingStep

#: Steps that run as usual before a capture. torch's documentation uses three; the optimizer's state
#: and cuDNN's plans exist after one, and torch.compile has then seen every call.
WARM_UP_STEPS = 3

#: Largest relative difference of loss and gradients, computed in FP32 or in half precision. Kernels
#: with atomic additions round differently in each run, and layers amplify it. What a wrong graph
#: does, such as reading an old batch or leaving out a micro-batch, differs by far more.
_TOLERANCE, _HALF_TOLERANCE = 1e-2, 5e-2
#: Gradients below this share of the largest one are compared with it: that of a bias before batch
#: norm is zero but for rounding.
_SHARE = 1e-2


def why_uncaptured(
    asked: bool | str,
    job: Job,
    optimizer: Optimizer,
    precision: Precision,
    known: str | None = None,
) -> str | None:
    """Return why steps cannot be captured, as far as that is known before the run.

    Args:
        asked: The recipe's ``cuda_graph``: True, False or ``"auto"``.
        job: The ranks.
        optimizer: The optimizer.
        precision: The precision.
        known: What else is known to speak against it; None: nothing.

    Returns:
        One line; empty if nobody asked for it, None if nothing speaks against it.

    Raises:
        RecipeError: They cannot, and ``asked`` is True.
    """
    if not asked:
        return ""
    reason = _obstacle(job, optimizer, precision) or known
    if reason and asked is True:
        raise RecipeError(f"cuda_graph: true, but {reason}; valid: auto or false")
    return reason


def _obstacle(job: Job, optimizer: Optimizer, precision: Precision) -> str | None:
    if job.device.type not in RECORDERS:
        return f"the device is {job.device.type}, which has no CUDA graphs"
    if job.world_size > 1:
        return f"the gradients of {job.world_size} ranks are reduced, which is not captured"
    reason = precision.capture_obstacle(optimizer)
    return reason and reason.partition("; valid")[0]


def put_rates_on_device(optimizer: Optimizer, device: torch.device) -> None:
    """Make the learning rates tensors, which a scheduler then fills in place.

    They are in FP64, as Python's numbers are; torch's fused optimizers take FP32 alone.
    """
    for group in optimizer.param_groups:
        dtype = torch.float32 if group.get("fused") else torch.float64
        group["lr"] = torch.tensor(float(group["lr"]), dtype=dtype, device=device)


class _Graph(NamedTuple):
    """A captured graph: what it returns at each replay, and the replay."""

    outputs: Any
    replay: Callable[[], None]


class _Graphs(NamedTuple):
    """The graphs of a step, with the tensors that they read and the gradients that they write."""

    inputs: Batch
    first: _Graph
    other: _Graph | None
    update: _Graph
    gradients: list[Tensor | None]
    options: list[dict[str, Any]]


class GraphedStep:
    """Takes optimizer steps as a :class:`TrainingStep` does, from graphs once they are checked.

    Where the shape or the number of micro-batches changes, or an option of the optimizer, steps are
    captured and checked again.

    Args:
        step: The step. With the capture, the learning rates of its optimizer become tensors on the
            device, which its scheduler fills.
        device: The device.
        say: Shows a line: from when steps are replayed, or why they are not.
        required: Whether to raise RecipeError where steps cannot be captured.
    """

    def __init__(
        self,
        step: TrainingStep,
        device: torch.device,
        say: Callable[[str], None],
        required: bool = False,
    ) -> None:
        self._step, self._device = step, device
        self._say, self._required = say, required
        self._form: Any = None  # of the micro-batches
        self._recorder: Recorder  # of the current form
        self._warm_up = 0  # steps to take before the capture
        self._graphs: _Graphs | None = None
        self._gave_up = False

    @property
    def phases(self) -> Phases:
        """Measures and names the phases of the steps."""
        return self._step.phases

    def __call__(
        self, batches: Iterator[Batch], accumulation: int, meter: Meter, *, waits: bool = False
    ) -> None:
        """Take a step; see :class:`TrainingStep`."""
        if self._gave_up:
            return self._step(batches, accumulation, meter, waits=waits)
        with self.phases.step(), self.phases.input:
            taken = [next(batches)]
        form = ([(t.shape, t.stride(), t.dtype) for t in taken[0]], accumulation)
        graphs, optimizer = self._graphs, self._step.optimizer
        if form != self._form or (graphs is not None and options_of(optimizer) != graphs.options):
            self._form, self._warm_up = form, WARM_UP_STEPS
            self._graphs = graphs = None  # frees its memory before more is allocated
            self._recorder = RECORDERS[self._device.type](self._device)
        if self._graphs is None and self._warm_up == 0:
            taken += [next(batches) for _ in range(accumulation > 1)]
            self._graphs = self._captured(taken, accumulation)
        given = chain(taken, batches)
        if self._graphs is not None:
            self._replay(self._graphs, given, accumulation, meter)
            if waits:
                self._check_skipped(self._graphs)
            return
        self._warm_up = max(0, self._warm_up - 1)
        self._recorder.warm_up(lambda: self._step(given, accumulation, meter, waits=waits))

    def _replay(
        self, graphs: _Graphs, batches: Iterator[Batch], accumulation: int, meter: Meter
    ) -> None:
        phases = self.phases
        with phases.undivided_step():
            for place in range(accumulation):
                with phases.input:
                    batch = next(batches)
                with phases.replay:
                    outputs = _replay_one(graphs, batch, place)
                with phases.meters:
                    meter.add(*outputs, batch.labels)
            with phases.replay_update:
                graphs.update.replay()
            if graphs.update.outputs is not None:
                with phases.meters:
                    meter.add_gradient_norm(graphs.update.outputs)

    def _check_skipped(self, graphs: _Graphs) -> None:
        """Raise GradientOverflowError if too many steps were skipped; it names layers."""
        for parameter, gradient in zip(
            self._step.model.parameters(), graphs.gradients, strict=True
        ):
            parameter.grad = gradient
        try:
            self._step.precision.check_skipped()
        finally:
            self._step.optimizer.zero_grad(set_to_none=True)

    def _captured(self, taken: list[Batch], accumulation: int) -> _Graphs | None:
        """Capture the graphs of a step, and check them on its first one or two micro-batches.

        Nothing changes by it: weights, buffers, the optimizer's state and the state of the random
        number generators are afterwards as before.

        Returns:
            The graphs; None if they are wrong, could not be captured, or could not be checked now
            because the gradients are not finite.
        """
        step = self._step
        before, held = Snapshot(step.model, self._device), References(step.optimizer)
        graphs, reason, cause = None, "", None
        try:
            put_rates_on_device(step.optimizer, self._device)
            expected = self._recorder.warm_up(lambda: self._eager(taken, accumulation))
            step.precision.abandon()
            before.restore()
            graphs = _capture(self._recorder, step, taken[0], accumulation)
            losses = [_replay_one(graphs, b, place)[0].clone() for place, b in enumerate(taken)]
            full = step.precision.form.compute == torch.float32
            tolerance = _TOLERANCE if full else _HALF_TOLERANCE
            same = _agree([*losses, *graphs.gradients], expected, tolerance)
            if same is False:
                reason = "a replayed step does not compute the gradients of the step as usual"
        except Exception as error:  # of any kind: the model and the optimizer may be the user's
            same, cause = False, error
            reason = f"a step cannot be captured: {_origin(error)}"
            step.optimizer.zero_grad(set_to_none=True)
            step.precision.abandon()
        before.restore()
        if same:
            self._say("cuda_graph: from here on, steps are replayed from CUDA graphs")
            return graphs
        held.restore()
        if same is False:
            if self._required:
                raise RecipeError(
                    f"cuda_graph: true, but {reason}; valid: auto or false"
                ) from cause
            cause = None  # its traceback holds this frame, and with it the memory of the graphs
            self._say(f"cuda_graph: not used: {reason}")
            self._gave_up = True
        # The next capture begins anew: torch refuses the pool of graphs that are gone.
        self._recorder = RECORDERS[self._device.type](self._device)
        return None

    def _eager(self, taken: list[Batch], accumulation: int) -> list[Tensor | None]:
        """Losses and gradients of the first micro-batches as they are computed without graphs."""
        step = self._step
        losses = [
            step.forward_backward(*batch, place, accumulation)[0]
            for place, batch in enumerate(taken)
        ]
        gradients = [parameter.grad for parameter in step.model.parameters()]
        step.optimizer.zero_grad(set_to_none=True)
        return [*losses, *gradients]


def _capture(recorder: Recorder, step: TrainingStep, like: Batch, accumulation: int) -> _Graphs:
    """Capture the graphs of a step on micro-batches in the form of ``like``.

    Raises:
        RuntimeError: The step does what a graph cannot repeat.
    """
    optimizer, parameters = step.optimizer, list(step.model.parameters())
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise RuntimeError("the optimizer has hooks, which a replay does not call")
    inputs = Batch(*(tensor.clone() for tensor in like))
    optimizer.zero_grad(set_to_none=True)  # so that the first graph writes gradients of its own
    first = recorder.capture(lambda: step.forward_backward(*inputs, 0, accumulation))
    gradients = [parameter.grad for parameter in parameters]
    other = None
    if accumulation > 1:
        other = _Graph(*recorder.capture(lambda: step.forward_backward(*inputs, 1, accumulation)))
        for gradient, parameter in zip(gradients, parameters, strict=True):
            if place_of(gradient) != place_of(parameter.grad):
                raise RuntimeError("a backward pass replaces gradients instead of adding to them")
    state = state_of(optimizer)
    update = recorder.capture(step.update)
    for key, value in state_of(optimizer).items():
        if key not in state or state[key] != value:
            raise RuntimeError(f"the optimizer changes its {key[-1]!r} outside of the device")
    optimizer.zero_grad(set_to_none=True)
    return _Graphs(inputs, _Graph(*first), other, _Graph(*update), gradients, options_of(optimizer))


def _replay_one(graphs: _Graphs, batch: Batch, place: int) -> tuple[Tensor, Tensor]:
    """Replay a micro-batch; return its loss and its logits, which the next replay overwrites."""
    graph = graphs.other if place else graphs.first
    assert graph is not None
    for tensor, given in zip(graphs.inputs, batch, strict=True):
        tensor.copy_(given)
    graph.replay()
    loss, logits = graph.outputs
    return loss, logits


def _origin(error: BaseException) -> str:
    """The first line of the error that led to another, such as that of the end of a capture."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".splitlines()[0]


@torch.no_grad()
def _agree(
    found: list[Tensor | None], expected: list[Tensor | None], tolerance: float
) -> bool | None:
    """Whether tensors are the same to ``tolerance``; None if those expected are not finite.

    The host waits for the device.
    """
    if [t is None for t in found] != [t is None for t in expected]:
        return False
    norms, differences = [], []
    for ours, theirs in zip(found, expected, strict=True):
        if ours is not None and theirs is not None:  # one by one, for the memory of one copy
            exact = theirs.double()
            norms.append(exact.norm())
            differences.append(exact.sub_(ours).norm())
    norm = torch.stack(norms)
    if not norm.isfinite().all():
        return None
    most = tolerance * norm.clamp(min=_SHARE * norm.max())
    return bool((torch.stack(differences) <= most).all())
