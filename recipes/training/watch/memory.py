"""The memory of a training step on one GPU, counted before a run on tensors without numbers.

Counted are tensors: parameters, gradients, masters, the optimizer's state, moving averages, DDP's
buckets, a micro-batch, what forward leaves for backward, and the temporary tensors of backward and
of the update. :data:`UNCOUNTED` names what comes on top.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from ....amp import MasterWeights, Precision
from ....lars import LARS
from ...errors import RecipeError
from ...models.batch_norm import share_statistics
from ...models.build import build_model
from ...models.optimizers import build_optimizer
from ...ranks import Job
from ...schema.recipe import Recipe
from ..device import device_settings
from ..step import training_loss
from .live_storage import LiveStorage

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
        activations: The micro-batch and what forward leaves for backward, with autocast's
            half-precision copies of parameters.
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
    activations: int
    temporary: int
    peak: int


class _Pass(NamedTuple):
    """Bytes of forward and backward of a micro-batch, each with those of the micro-batch.

    ``left`` stays between the two. At ``peak`` each gradient is taken away as soon as it is
    complete, at ``peak_keeping`` it is kept.
    """

    batch: int
    left: int
    peak: int
    peak_keeping: int


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
        self._passes: dict[tuple[str, int, int], _Pass] = {}
        self._updates: dict[str, Memory] = {}
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
        alone = self._update_of(precision)
        one = self._pass_of(precision, micro_batch_size, image_size)
        # DDP copies a gradient into its bucket as soon as it is complete. Those that accumulate
        # before are tensors of their own, which exist beside the buckets.
        buckets = alone.gradients if ranks > 1 else 0
        gradients = alone.gradients if ranks == 1 or accumulation > 1 else 0
        peak = one.peak_keeping if ranks == accumulation == 1 else one.peak + gradients
        beside = 0 if buckets else gradients  # during the update, when the batch is still there
        update = beside + alone.temporary + one.batch
        return replace(
            alone,
            micro_batch_size=micro_batch_size,
            gradients=gradients,
            buckets=buckets,
            activations=one.left,
            temporary=alone.temporary if update > peak else one.peak - one.left,
            peak=alone.peak + buckets + max(peak, update),
        )

    def gradient_bytes(self, precision: str) -> int:
        """Bytes of all gradients, as DDP reduces them."""
        return self._update_of(precision).gradients

    def checkpoint_bytes(self, precision: str, ranks: int) -> int:
        """Bytes of a checkpoint, which has the buffers of every rank."""
        return self._update_of(precision).peak + (ranks - 1) * _bytes(self.model.buffers())

    def _made(self) -> nn.Module:
        """The model on the meta device, to be converted and changed."""
        if self._given is None:
            model = meta_model(self._recipe, self._classes)
        else:
            model = without_numbers(self._given)
        if self._recipe.batch_norm.images:
            share_statistics(model, self._recipe, Job(0, 1, 1, torch.device("cpu")))
        return model

    def _update_of(self, name: str) -> Memory:
        """The memory of an update alone; its ``peak`` is without gradients and ``temporary``."""
        if name not in self._updates:
            recipe = self._recipe.model_copy(update={"precision": name})
            model = Precision(name, loss_scale="none").convert(self._made())
            optimizer = build_optimizer(recipe, model)
            temporary = _temporary_of_update(recipe, model, optimizer)
            weights, buffers = [*model.parameters()], [*model.buffers()]
            averaged = weights + [b for b in buffers if b.is_floating_point()]
            masters, state = _bytes(_state_of(optimizer, "master")), _bytes(_state_of(optimizer))
            parameters = _bytes(weights + buffers)
            ema = 0 if recipe.ema.decay is None else 4 * sum(t.numel() for t in averaged)
            if temporary is None:
                state = masters
            self._updates[name] = Memory(
                precision=name,
                micro_batch_size=0,
                parameters=parameters,
                gradients=_bytes(p for p in weights if p.requires_grad),
                masters=masters,
                state=None if temporary is None else state - masters,
                ema=ema,
                buckets=0,
                activations=0,
                temporary=temporary or 0,
                peak=parameters + state + ema,
            )
        return self._updates[name]

    def _pass_of(self, name: str, micro_batch_size: int, image_size: int) -> _Pass:
        key = (name, micro_batch_size, image_size)
        if key not in self._passes:
            model = self._made()
            try:
                self._passes[key] = self._counted(model, *key)
            except Exception as error:  # of any kind: the model may be the user's
                raise RecipeError(
                    f"model.name: the memory of {self._recipe.model.name} cannot be counted on "
                    f"{micro_batch_size} images of {image_size} px without numbers: "
                    f"{_line(error)}; valid: a model whose forward pass does not read values of "
                    "tensors"
                ) from error
        return self._passes[key]

    def _counted(self, model: nn.Module, name: str, count: int, size: int) -> _Pass:
        """Run a model on the meta device forward and backward on ``count`` images."""
        recipe, precision = self._recipe, Precision(name, loss_scale="none")
        device = torch.device("cpu" if recipe.device == "cpu" else "cuda")
        form: dict[str, Any] = {
            "memory_format": device_settings(
                device, recipe.channels_last, recipe.cudnn_benchmark, recipe.tf32
            ).memory_format
        }
        model = precision.convert(model).train().to(**form)
        with FakeTensorMode(allow_non_fake_inputs=True):
            _make_fake(model)
            # As the loader delivers images.
            dtype = torch.float16 if name.startswith("fp16") else torch.float32
            images = torch.empty((count, 3, size, size), dtype=dtype).to(**form)
            batch = [images, torch.zeros(count, dtype=torch.int64)]
            live = LiveStorage([*model.parameters(), *model.buffers(), *batch])

            def take_away(parameter: Tensor) -> None:
                live.away += _bytes([parameter.grad])  # type: ignore[list-item]
                parameter.grad = None

            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(take_away)
            with live:
                with precision.forward():
                    loss = training_loss(
                        model(images), batch[1], label_smoothing=recipe.label_smoothing
                    )
                left = live.bytes
                loss.backward()
        own = _bytes(batch)
        return _Pass(own, own + left, own + live.peak, own + live.peak_keeping)


def meta_model(recipe: Recipe, classes: int) -> nn.Module:
    """Build the model of a recipe on the meta device.

    Raises:
        RecipeError: It cannot be built, or not on the meta device.
    """
    try:
        with torch.device("meta"):
            return build_model(recipe.model, classes)
    except RecipeError as error:
        if "meta" not in str(error.__cause__):
            raise
        raise RecipeError(
            f"model.name: {recipe.model.name} cannot be built on the meta device: "
            f"{_line(error.__cause__)}; valid: a model that does not read values of tensors when "
            "it is made"
        ) from error


def without_numbers(model: nn.Module) -> nn.Module:
    """Copy a model to the meta device; what is not a parameter or buffer is copied as it is."""
    return copy.deepcopy(model, {id(old): new for old, new in _empty(model, "meta").items()})


def _make_fake(model: nn.Module) -> None:
    """Replace parameters and buffers by fake ones on the CPU, tied ones once, in fake mode."""
    made = _empty(model, "cpu")
    for module in model.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in held:
            tensors.update({name: made[t] for name, t in tensors.items() if t is not None})


def _empty(model: nn.Module, device: str) -> dict[Tensor, Any]:
    """An empty tensor on a device in place of each of the model's parameters and buffers."""
    made: dict[Tensor, Any] = {b: torch.empty_like(b, device=device) for b in model.buffers()}
    for old in model.parameters():
        made[old] = nn.Parameter(torch.empty_like(old, device=device), old.requires_grad)
    return made


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
            gradients = [p.grad for p in parameters if p.grad is not None]
            known = [*model.parameters(), *model.buffers(), *_state_of(optimizer), *gradients]
            with LiveStorage(known) as live:
                optimizer.step()
    except Exception:  # of any kind, where an optimizer reads numbers
        return None
    # LARS takes its steps in place in Triton and on a CPU, there with masters but for workspaces
    # of a block; only its other forms can be traced.
    return 0 if type(inner) is LARS else live.peak


def _state_of(optimizer: Optimizer, name: str | None = None) -> list[Tensor]:
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
