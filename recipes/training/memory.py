"""The memory of a training step on one GPU, counted before a run on tensors without numbers.

Counted are tensors: parameters, gradients, masters, the optimizer's state, moving averages, DDP's
buckets, a micro-batch, what forward leaves for backward, and the temporary tensors of backward and
of the update. :data:`UNCOUNTED` names what comes on top.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...amp import PRECISIONS, MasterWeights, Precision
from ...lars import LARS
from ..errors import RecipeError
from ..models.batch_norm import share_statistics
from ..models.build import build_model
from ..models.optimizers import build_optimizer
from ..ranks import Job
from ..schema.recipe import Recipe
from .device_settings import device_settings
from .live_storage import LiveStorage, Pass, count_pass
from .loss import training_loss

#: What a GPU holds besides the tensors that are counted.
UNCOUNTED = (
    "the CUDA context and loaded kernels",
    "workspaces of cuDNN and cuBLAS",
    "buffers of NCCL and of other all-reduce algorithms",
    "decoded images ahead of use",
    "gaps in the allocator's blocks",
)


@dataclass(frozen=True)
class Memory:
    """The memory of a training step on one GPU, in bytes.

    Attributes:
        precision: Name of the precision.
        micro_batch_size: Images of a forward pass.
        parameters: Parameters and buffers, as the precision stores them.
        gradients: Gradients outside of DDP's buckets. 0 where backward writes straight into these.
        masters: FP32 masters of half-precision parameters.
        state: State of the optimizer, such as momentum; None if it could not be counted.
        ema: The moving average of the weights.
        buckets: DDP's buckets, with several ranks.
        images: The micro-batch.
        activations: What forward leaves for backward.
        casts: Half-precision copies of parameters, made by autocast.
        temporary: What backward, or else the update, adds at the moment when most is held.
        peak: The largest sum at one time. It is below the sum of all parts where gradients take
            the place of activations, or where only the update holds ``temporary``.
    """

    precision: str
    micro_batch_size: int
    parameters: int
    gradients: int
    masters: int
    state: int | None
    ema: int
    buckets: int
    images: int
    activations: int
    casts: int
    temporary: int
    peak: int

    def as_json(self) -> dict[str, Any]:
        """Return the values by name."""
        return asdict(self)


@dataclass(frozen=True)
class _Fixed:
    """What does not depend on the batch, in bytes; ``update``: temporary tensors of an update."""

    parameters: int
    gradients: int
    masters: int
    state: int | None
    ema: int
    update: int


class MemoryCounter:
    """Counts the memory of a recipe's training step; each different pass is counted once.

    Args:
        recipe: The recipe.
        classes: Number of classes.
        model: The model as it was built, on any device, to count in place of a new one. It is not
            changed.

    Raises:
        RecipeError: The model cannot be built without numbers, or the optimizer does not fit.
    """

    def __init__(self, recipe: Recipe, classes: int, model: nn.Module | None = None) -> None:
        self._recipe, self._classes = recipe, classes
        self._passes: dict[tuple[Any, ...], Pass] = {}
        self._fixed: dict[str, _Fixed] = {}
        self._given = model
        self.model = self._made()

    def count(
        self,
        precision: str,
        micro_batch_size: int,
        image_size: int,
        *,
        ranks: int = 1,
        accumulation: int = 1,
    ) -> Memory:
        """Count the memory of a step on one of ``ranks`` GPUs.

        Args:
            precision: A key of ``PRECISIONS``.
            micro_batch_size: Images of a forward pass.
            image_size: Height and width of the images, in pixels.
            ranks: Number of GPUs.
            accumulation: Number of micro-batches of a GPU in a step.

        Raises:
            RecipeError: The model cannot run without numbers, or the optimizer does not work in
                this precision.
        """
        fixed = self._fixed_of(precision)
        one = self._pass_of(precision, micro_batch_size, image_size)
        # DDP copies a gradient into its bucket as soon as it is complete. Those that accumulate
        # before are tensors of their own, which exist beside the buckets.
        buckets = fixed.gradients if ranks > 1 else 0
        gradients = fixed.gradients if ranks == 1 or accumulation > 1 else 0
        peak = one.peak + gradients
        if ranks == accumulation == 1:
            peak = one.peak_keeping
        left = one.images + one.activations + one.casts
        held = fixed.parameters + fixed.masters + (fixed.state or 0) + fixed.ema + buckets
        beside = 0 if buckets else gradients  # during the update, when the batch is still there
        update = beside + fixed.update + one.images
        return Memory(
            precision,
            micro_batch_size,
            fixed.parameters,
            gradients,
            fixed.masters,
            fixed.state,
            fixed.ema,
            buckets,
            one.images,
            one.activations,
            one.casts,
            fixed.update if update > peak else one.peak - left,
            held + max(peak, update),
        )

    def gradient_bytes(self, precision: str) -> int:
        """Bytes of all gradients, as DDP reduces them."""
        return self._fixed_of(precision).gradients

    def checkpoint_bytes(self, precision: str, ranks: int) -> int:
        """Bytes of a checkpoint, which has the buffers of every rank."""
        fixed = self._fixed_of(precision)
        buffers = _bytes(self.model.buffers())
        parts = (fixed.parameters, fixed.masters, fixed.state or 0, fixed.ema)
        return sum(parts) + (ranks - 1) * buffers

    def _made(self) -> nn.Module:
        """The model on the meta device, to be converted and changed."""
        if self._given is None:
            return meta_model(self._recipe, self._classes)
        return _with_ghosts(without_numbers(self._given), self._recipe)

    def _fixed_of(self, name: str) -> _Fixed:
        if name not in self._fixed:
            recipe = self._recipe.model_copy(update={"precision": name})
            model = Precision(name, loss_scale="none").convert(self._made())
            optimizer = build_optimizer(recipe, model)
            update = _temporary_of_update(recipe, model, optimizer)
            parameters = [*model.parameters()]
            masters, state = _state_of(optimizer)
            averaged = [*parameters, *(b for b in model.buffers() if b.is_floating_point())]
            ema = 4 * sum(t.numel() for t in averaged) if recipe.ema.decay is not None else 0
            self._fixed[name] = _Fixed(
                _bytes([*parameters, *model.buffers()]),
                _bytes(p for p in parameters if p.requires_grad),
                masters,
                None if update is None else state,
                ema,
                update or 0,
            )
        return self._fixed[name]

    def _pass_of(self, name: str, micro_batch_size: int, image_size: int) -> Pass:
        recipe, form = self._recipe, PRECISIONS[name]
        # As the loader delivers images.
        dtype = torch.float16 if name.startswith("fp16") else torch.float32
        widths = (form.compute.itemsize, form.parameters.itemsize, dtype.itemsize)
        key = (*widths, micro_batch_size, image_size)
        if key not in self._passes:
            precision = Precision(name, loss_scale="none")
            model = precision.convert(self._made())
            device = torch.device("cpu" if recipe.device == "cpu" else "cuda")
            try:
                self._passes[key] = count_pass(
                    model,
                    (micro_batch_size, 3, image_size, image_size),
                    partial(training_loss, label_smoothing=recipe.label_smoothing),
                    forward=precision.forward,
                    dtype=dtype,
                    memory_format=device_settings(recipe, device).memory_format,
                )
            except Exception as error:  # of any kind: the model may be the user's
                raise RecipeError(
                    f"model.name: the memory of {recipe.model.name} cannot be counted on "
                    f"{micro_batch_size} images of {image_size} px without numbers: "
                    f"{_line(error)}; valid: a model whose forward pass does not read values of "
                    "tensors"
                ) from error
        return self._passes[key]


def meta_model(recipe: Recipe, classes: int) -> nn.Module:
    """Build the model of a recipe on the meta device.

    Raises:
        RecipeError: It cannot be built, or not on the meta device.
    """
    try:
        with torch.device("meta"):
            model = build_model(recipe.model, classes)
    except RecipeError as error:
        if "meta" not in str(error.__cause__):
            raise
        raise RecipeError(
            f"model.name: {recipe.model.name} cannot be built on the meta device: "
            f"{_line(error.__cause__)}; valid: a model that does not read values of tensors when "
            "it is made"
        ) from error
    return _with_ghosts(model, recipe)


def without_numbers(model: nn.Module) -> nn.Module:
    """Copy a model to the meta device; what is not a parameter or buffer is copied as it is."""
    known: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        known[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        known[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, known)


def _with_ghosts(model: nn.Module, recipe: Recipe) -> nn.Module:
    """A model, changed in place to take the statistics of batch norm over slices if asked to."""
    if recipe.batch_norm.images:
        share_statistics(model, recipe, Job(0, 1, 1, torch.device("cpu")))
    return model


def _line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _temporary_of_update(recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> int | None:
    """Temporary bytes of an update, which also makes the state; None if it cannot be traced."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    inner = optimizer._inner if isinstance(optimizer, MasterWeights) else optimizer
    if recipe.device != "cpu":  # as torch chooses on a GPU
        for group in inner.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
    try:
        for _ in range(2):  # the first update makes the state
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            known = [*parameters, *model.buffers(), *_tensors(optimizer)]
            known += [p.grad for p in parameters if p.grad is not None]
            with LiveStorage(known) as live:
                optimizer.step()
    except Exception:  # of any kind, where an optimizer reads numbers
        return None
    # LARS takes its steps in place on a CPU and in Triton; only its other forms can be traced.
    return 0 if type(inner) is LARS else live.peak


def _state_of(optimizer: Optimizer) -> tuple[int, int]:
    """Bytes of the masters and of the other state."""
    masters = {t.untyped_storage()._cdata: t for t in _tensors(optimizer, "master")}
    others = [t for t in _tensors(optimizer) if t.untyped_storage()._cdata not in masters]
    return _bytes(masters.values()), _bytes(others)


def _tensors(optimizer: Optimizer, name: str | None = None) -> list[Tensor]:
    """Tensors of the optimizer's state, of the wrapped one too; all, or those called ``name``."""
    states = [*optimizer.state.values()]
    if isinstance(optimizer, MasterWeights):
        states += optimizer._inner.state.values()
    return [
        value
        for state in states
        for key, value in state.items()
        if isinstance(value, Tensor) and name in (None, key)
    ]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, tied ones once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
