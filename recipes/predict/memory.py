"""The memory of a training step on one GPU, counted before a run on tensors without numbers.

Counted are tensors: parameters, gradients, masters, the optimizer's state, moving averages, DDP's
buckets, a micro-batch, what forward leaves for backward, and the temporary tensors of backward and
of the update. :data:`UNCOUNTED` names what comes on top.

The passes run on fake tensors (torch's ``FakeTensorMode``), which have a shape, a dtype and a
device but no numbers, in a second or two and next to no memory. torch's own ``MemTracker``, which
is private, finds the same bytes in more time, and fails on models with frozen parameters or with
modules that call themselves.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...amp import MasterWeights, Precision
from ...lars import LARS
from ..errors import RecipeError
from ..models.batch_norm import share_statistics
from ..models.build import build_model
from ..models.optimizers import build_optimizer
from ..ranks import Job
from ..schema.recipe import Recipe
from ..training.build import loss_of
from ..training.device import device_settings

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
    """The memory of a training step on one GPU, in bytes."""

    precision: str
    micro_batch_size: int  # images of a forward pass
    parameters: int  # and buffers, as the precision stores them
    gradients: int  # also those in DDP's buckets, where others accumulate beside them
    state: int | None  # of the optimizer, with FP32 masters; None if it could not be counted
    ema: int  # the moving average of the weights
    activations: int  # the micro-batch and what forward leaves for backward, with autocast's copies
    peak: int  # the largest sum at one time, with temporary tensors of backward and of the update


class _Held(NamedTuple):
    """Bytes of what a step holds from one to the next, and of its update."""

    parameters: int
    gradients: int
    state: int  # of the optimizer, or of its masters alone
    is_known: bool  # whether it is the whole state
    ema: int
    temporary: int  # tensors of the update


class MemoryCounter:
    """Counts the memory of a recipe's training steps; each different pass is counted once.

    The steps are those of a GPU, unless the recipe is for the CPU.
    """

    def __init__(self, recipe: Recipe, classes: int) -> None:
        device = torch.device("cpu" if recipe.device == "cpu" else "cuda")
        self.model = meta_model(recipe, classes)
        if recipe.batch_norm.images:
            share_statistics(self.model, recipe, Job(0, 1, 1, torch.device("cpu")))
        self._recipe, self._on_gpu, self._loss = recipe, device.type == "cuda", loss_of(recipe)
        self._format = device_settings(recipe, device).memory_format
        self._mixed_classes = classes if recipe.mixing.is_on else 0
        self._update_of, self._pass_of = cache(self._count_update), cache(self._count_pass)

    def count(
        self,
        precision: str,
        micro_batch_size: int,
        image_size: int,
        *,
        ranks: int = 1,
        accumulation: int = 1,
    ) -> Memory:
        """Count the memory of a step on one of ``ranks`` GPUs, with images of some pixels' side."""
        parameters, gradients, state, known, ema, temporary = self._update_of(precision)
        batch, left, apart, keeping = self._pass_of(precision, micro_batch_size, image_size)
        # DDP copies a gradient into its bucket as soon as it is complete. Those that accumulate
        # before are tensors of their own, which exist beside the buckets.
        buckets = gradients if ranks > 1 else 0
        others = gradients if ranks == 1 or accumulation > 1 else 0
        peak = keeping if ranks == accumulation == 1 else apart + others
        # During the update, the batch is still there.
        update = batch + temporary + (0 if buckets else others)
        return Memory(
            precision,
            micro_batch_size,
            parameters,
            buckets + others,
            state if known else None,
            ema,
            left,
            parameters + state + ema + buckets + max(peak, update),
        )

    def gradient_bytes(self, precision: str) -> int:
        """Bytes of all gradients, as DDP reduces them."""
        return self._update_of(precision).gradients

    def checkpoint_bytes(self, precision: str, ranks: int) -> int:
        """Bytes of a checkpoint, which has the buffers of every rank."""
        held = self._update_of(precision)
        buffers = (ranks - 1) * _bytes(self.model.buffers())
        return held.parameters + held.state + held.ema + buffers

    def _count_update(self, name: str) -> _Held:
        model = Precision(name, loss_scale="none").convert(without_numbers(self.model))
        optimizer = build_optimizer(self._recipe.model_copy(update={"precision": name}), model)
        temporary = _temporary_of_update(model, optimizer, self._on_gpu)
        weights, buffers = [*model.parameters()], [*model.buffers()]
        averaged = weights + [b for b in buffers if b.is_floating_point()]
        return _Held(
            parameters=_bytes(weights + buffers),
            gradients=_bytes(p for p in weights if p.requires_grad),
            state=_bytes(_state_of(optimizer, "master" if temporary is None else None)),
            is_known=temporary is not None,
            ema=4 * sum(t.numel() for t in averaged) if self._recipe.ema.decay is not None else 0,
            temporary=temporary or 0,
        )

    def _count_pass(self, name: str, count: int, size: int) -> tuple[int, ...]:
        """Bytes of a micro-batch, with what it leaves, at most in backward, and with gradients."""
        try:
            return self._run(without_numbers(self.model), name, count, size)
        except Exception as error:  # of any kind: the model may be the user's
            raise RecipeError(
                f"model.name: a step on {count} images of {size} px cannot be counted without "
                f"numbers: {_line(error)}; valid: a model whose forward pass does not read values "
                "of tensors"
            ) from error

    def _run(self, model: nn.Module, name: str, count: int, size: int) -> tuple[int, ...]:
        precision, form = Precision(name, loss_scale="none"), {"memory_format": self._format}
        model = precision.convert(model).train().to(**form)
        with FakeTensorMode(allow_non_fake_inputs=True):
            _make_fake(model)
            # As the loader delivers images.
            dtype = torch.float16 if name.startswith("fp16") else torch.float32
            images = torch.empty((count, 3, size, size), dtype=dtype).to(**form)  # type: ignore
            targets = torch.zeros(count, dtype=torch.int64)
            batch = [images, targets]
            if self._mixed_classes:  # into new images and dense targets, beside the loader's
                targets = torch.zeros(count, self._mixed_classes)
                batch += [torch.empty_like(images), targets]
            live = LiveStorage([*model.parameters(), *model.buffers(), *batch])

            def take_away(parameter: Tensor) -> None:
                live.away += _bytes([parameter.grad])  # type: ignore[list-item]
                parameter.grad = None

            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(take_away)
            with live:
                with precision.forward():
                    loss = self._loss(model(images), targets)
                left = live.bytes
                loss.backward()
        own = _bytes(batch)
        return own, own + left, own + live.peak, own + live.peak_keeping


def meta_model(recipe: Recipe, classes: int) -> nn.Module:
    """Build the model of a recipe on the meta device."""
    try:
        with torch.device("meta"):
            return build_model(recipe.model, classes)
    except RecipeError as error:
        if "meta" not in str(error.__cause__):
            raise
        raise RecipeError(
            f"model.name: {recipe.model.name} cannot be built on the meta device: "
            f"{error.__cause__}; valid: a model that does not read values of tensors when it is "
            "made"
        ) from error


class LiveStorage(TorchDispatchMode):
    """Follows the memory of all tensors that operators return, but ``known`` ones, in a context."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self.bytes = self.peak = 0  # that are held now, and at most
        # What the user of this object has freed and ``peak_keeping`` shall still count.
        self.away = self.peak_keeping = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            weakref.finalize(storage, self._forget, key, size)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            self.peak_keeping = max(self.peak_keeping, self.bytes + self.away)

    def _forget(self, key: int, size: int) -> None:
        self._seen.remove(key)
        self.bytes -= size


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


def _temporary_of_update(model: nn.Module, optimizer: Optimizer, on_gpu: bool) -> int | None:
    """Temporary bytes of an update, which also makes the state; None if it cannot be traced."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    inner = optimizer._inner if isinstance(optimizer, MasterWeights) else optimizer
    if on_gpu:  # as torch chooses there
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
