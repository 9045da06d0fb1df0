"""``Precision``: the dtype of forward and backward, loss scaling, and the optimizer's step.

Follows Micikevicius et al. 2018 (arXiv 1710.03740) and Jia et al. 2018 (arXiv 1807.11205).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .convert import convert
from .forms import PRECISIONS, precision_name
from .gradients import is_sharded, parameters_of
from .loss_scale import GradientOverflowError, LossScaler, any_of, divides_gradients
from .overflow import affected
from .statistics import Statistics


class Precision:
    """Mixed precision for any training loop.

    Args:
        name: one of ``PRECISIONS`` or of apex's O0 to O3:

            - ``"fp32"`` (O0);
            - ``"bf16"``, ``"fp16"`` (O1): FP32 parameters, forward under autocast;
            - ``"bf16-master"``, ``"fp16-master"`` (O2): parameters and gradients in half
              precision, so that an all-reduce moves half the bytes; norm layers in FP32, and FP32
              masters in the optimizer;
            - ``"fp16-pure"`` (O3): like ``"fp16-master"`` without masters.
        device_type: ``"cuda"``, which needs a GPU, or ``"cpu"``.
        loss_scale: ``"dynamic"``, ``"none"``, a number for a static scale, or ``"auto"``: dynamic
            where gradients are computed in FP16, else none (BF16 has the range of FP32).
        max_skipped_steps: number of consecutive steps skipped because of overflow that stops
            training.
        min_loss_scale: the least dynamic scale, as in apex.amp.

    Attributes:
        name: the name in ``PRECISIONS``, also if an apex level was given.
        form: the dtypes that the precision computes and stores.

    Raises:
        ValueError: the name, the loss scale or the number of skipped steps is invalid, or there is
            no GPU.

    Example::

        precision = Precision("fp16-master", "cuda")
        model = precision.convert(model)  # before DDP and torch.compile
        optimizer = LARS(model.parameters(), lr, master_weights=True)  # or MasterWeights(SGD(...))
        for images, labels in loader:
            with precision.forward():
                loss = criterion(model(images), labels)
            precision.backward(loss)
            precision.clip_grad_norm_(optimizer, 1.0)  # if you clip
            precision.step(optimizer)
            optimizer.zero_grad()

    A CUDA graph may contain an iteration from its first :meth:`forward` to :meth:`step`, if the
    optimizer's step can be captured and, with a loss scale, divides by it itself (as LARS does). It
    then scales, skips, counts and puts statistics back in each replay as in eager steps; call
    :meth:`check_skipped` now and then. Where a graph contains forward and backward only, call
    :meth:`before_replay` before each replay. Either needs an eager step before the capture, as
    state that is made in a capture is made again in each replay.
    """

    def __init__(
        self,
        name: str = "fp32",
        device_type: str = "cpu",
        *,
        loss_scale: str | float = "auto",
        max_skipped_steps: int = 20,
        min_loss_scale: float = 1.0,
    ) -> None:
        self.name = precision_name(name)
        self.form = PRECISIONS[self.name]
        if device_type == "cuda" and not torch.cuda.is_available():
            # torch would warn, and then train without autocast and without a loss scale.
            raise ValueError(
                f"precision {self.name} on device 'cuda': torch finds no GPU; valid: 'cpu'"
            )
        self.device_type = device_type
        if loss_scale == "auto":
            loss_scale = "dynamic" if self.form.compute == torch.float16 else "none"
        self._scaler = LossScaler(loss_scale, device_type, max_skipped_steps, min_loss_scale)
        self._statistics = Statistics()
        self._checked: WeakSet[Optimizer] = WeakSet()
        bounds = {"max_skipped_steps": max_skipped_steps, "min_loss_scale": min_loss_scale}
        self._again = partial(type(self), name, device_type, loss_scale=loss_scale, **bounds)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or pickle has the loss scale and the counts, but no models: it converts its own.
        return self._again, (), self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state)

    def convert(self, model: nn.Module) -> nn.Module:
        """Cast ``model`` in place to the dtypes of this precision, and return it.

        Call this before wrapping the model in DDP and before torch.compile, in every precision.
        With the other precisions than ``*-master`` and ``fp16-pure`` the model does not change.
        With these it then takes inputs of any floating dtype and returns FP32, also inside lists,
        tuples, mappings and dataclasses; norm layers stay in FP32, and so do buffers with a finite
        value that the half precision cannot hold (in FP16, beyond 65504). FP64 buffers stay in
        FP64. Every layer with parameters casts its inputs to their dtype, so methods that are
        called directly, such as ``forward_features`` of timm's models, take FP32 inputs too; their
        outputs are not cast. After ``model.float()`` the model computes in FP32, and may be
        converted again; so may a copy, a part or a reloaded pickle, whose new layers are then cast.

        The precision remembers the model (by a weak reference), to name its layers in errors and to
        put back running statistics in a skipped iteration: all buffers of each module in training
        mode that has a floating-point one. Several models may be converted by one precision. A copy
        or pickle of a model is another model, to be converted too.

        Args:
            model: the model.

        Raises:
            ValueError: the model is in the other half precision, or has a parameter in FP64 or with
                a finite value that half precision cannot hold. Nothing has been changed then.
        """
        if self.form.casts_parameters:
            convert(model, self.form.parameters)
        self._statistics.watch(model)
        return model

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Return the context manager of the forward pass and the loss, which may also decorate it.

        A context is entered once. A decorated function begins a forward pass in each call.
        """
        self._remember()
        if self.form.casts_parameters or self.form.compute == torch.float32:
            yield
        else:
            with torch.autocast(self.device_type, self.form.compute):
                yield

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Accumulate the gradients of ``loss`` (0-d), multiplied by the loss scale, if any.

        Args:
            loss: the loss.
            retain_graph: keep the graph, for another loss that shares a part of it.
        """
        self._scaler.scale(loss).backward(retain_graph=retain_graph)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the loss scale, to inspect or change them.

        Call it after the last backward pass of an iteration, and :meth:`step` afterwards. Without
        loss scaling there is nothing to do. The host does not wait for the device.

        FP16 gradients are refused, since FP16 cannot hold small unscaled ones: read a copy,
        ``p.grad.float() / precision.loss_scale_on_device``, or use :meth:`clip_grad_norm_`.

        Raises:
            RuntimeError: the gradients are unscaled already, or there has been no backward pass
                since the last step.
            ValueError: the gradients are in FP16.
        """
        self._check(optimizer)
        self._scaler.unscale_(optimizer)

    def clip_grad_norm_(
        self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip the total norm of the unscaled gradients of an optimizer, and return it.

        The same as :func:`torch.nn.utils.clip_grad_norm_` in FP32, in every precision. Call it
        after the last backward pass of an iteration, directly before :meth:`step`; also after
        :meth:`unscale_`, or twice. An overflow still skips the step.

        Gradients of LARS, :class:`MasterWeights` and torch's fused optimizers stay as they are: the
        optimizer multiplies them by the clip factor in its step, in FP32. Those of other optimizers
        are unscaled and clipped in place.

        Args:
            optimizer: the optimizer whose gradients are clipped, all parameter groups together.
            max_norm: the largest norm, > 0; infinity only measures it.
            norm_type: the order of the norm, > 0; may be infinity, but not with sharded parameters.

        Returns:
            The total norm of the unscaled gradients before clipping: 0-d, FP32, on the device, for
            which the host does not wait. With sharded parameters it is that of the whole gradients,
            and the call is a collective. After an overflow it is not finite.

        Raises:
            RuntimeError: there has been no backward pass since the last step, or one after the
                gradients were unscaled or clipped.
            ValueError: ``max_norm`` or ``norm_type`` is out of range, or infinity with sharded
                parameters, or loss scaling does not work with this optimizer (see :meth:`step`).
        """
        for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
            if not value > 0:
                raise ValueError(f"{name} must be > 0, not {value!r}")
        if norm_type == math.inf and any(map(is_sharded, parameters_of(optimizer))):
            # A rank with an empty shard would fail alone, and the others would wait for it.
            raise ValueError("norm_type must be finite with sharded parameters, not inf")
        self._check(optimizer)
        return self._scaler.clip_(optimizer, max_norm, norm_type)

    def step(self, *optimizers: Optimizer) -> None:
        """Unscale the gradients and step; where they overflowed, change only the loss scale.

        Give all optimizers of an iteration in one call, ``step(a, b)``: the loss scale changes once
        at its end. An optimizer whose gradients overflowed is skipped, the others are not. Running
        statistics of a converted model are put back to what they were before the iteration where an
        optimizer of its parameters is skipped, or any if none has its parameters. With a loss
        scale, those that are not finite are put back in any case.

        Raises:
            GradientOverflowError: ``max_skipped_steps`` iterations in a row were skipped: on a CPU
                the last of them raises it; on a GPU, where the host does not wait for the count, a
                later one, by twice ``max_skipped_steps`` or 40 iterations at most, whichever is
                more, and the same on all ranks. :meth:`check_skipped` raises it at once. The
                message names the parameters where the overflow begins, and the norm layers whose
                statistics are not finite if the forward pass overflowed.
            RuntimeError: loss scaling is on and there has been no :meth:`backward` since the last
                step, or one after gradients were unscaled or clipped.
            ValueError: there is no optimizer, or one is given twice; the precision needs master
                weights and an optimizer has none; the model has not been converted; or an optimizer
                cannot unscale FP16 gradients. After either of these two nothing has been changed.
        """
        if not optimizers or len(set(optimizers)) < len(optimizers):
            raise ValueError(
                "step takes each optimizer of the iteration once; valid: precision.step(a, b)"
            )
        for optimizer in optimizers:
            self._check(optimizer)
        skipped = self._scaler.step(optimizers)
        flags = list(skipped.values())
        too_many = self._scaler.skipped_steps.count(any_of(flags)) if flags else 0
        # Before statistics are put back, as the message names those that are not finite.
        error = self._too_many(too_many) if too_many else None
        self._statistics.end(lambda model: _skips(model, skipped))
        if error is not None:
            raise error

    def check_skipped(self) -> None:
        """Raise GradientOverflowError if too many iterations in a row have been skipped; waits.

        Only loops whose :meth:`step` is replayed by a CUDA graph need it: call it where the loop
        waits for the device anyway, to log, on all ranks alike. The message names layers if the
        gradients have not been cleared yet.
        """
        too_many = self._scaler.skipped_steps.too_many()
        if too_many:
            raise self._too_many(too_many)

    def before_replay(self) -> None:
        """Do what :meth:`forward` and :meth:`backward` do on the host, which no replay repeats.

        For a CUDA graph that contains them without :meth:`step`: call it before the capture and
        before each replay.
        """
        self._remember()
        self._scaler.before_replay()

    def abandon(self) -> None:
        """Abandon an iteration that has begun, such as a bad batch; no :meth:`step` will follow.

        The loss scale stays as it is. With a loss scale, running statistics that the forward pass
        has changed are put back, as in a skipped step. Clear the gradients too.
        """
        self._statistics.end(lambda _: torch.ones((), dtype=torch.bool))
        self._scaler.abandon()

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled, so that steps can be skipped."""
        return self._scaler.enabled

    @property
    def loss_scale(self) -> float:
        """The current loss scale; 1 without scaling. Reading it waits for the device."""
        return self._scaler.value

    @property
    def loss_scale_on_device(self) -> Tensor | float:
        """The current loss scale for arithmetic on the device, 0-d, FP32, or 1.0 without scaling.

        Reading it does not wait. The next :meth:`step` may change it in place.
        """
        return self._scaler.on_device

    @property
    def skipped_steps(self) -> int:
        """Number of iterations so far that any optimizer skipped. Reading it waits."""
        return self._scaler.skipped_steps.in_all

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and its history; empty without scaling."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; ignored unless both precisions scale the loss.

        An iteration that has begun is abandoned: call this after loading the model.
        """
        self._statistics.end(lambda _: None)
        self._scaler.load_state_dict(state)

    def _check(self, optimizer: Optimizer) -> None:
        """Raise ValueError if the optimizer does not fit the precision; checked once."""
        if optimizer in self._checked:
            return
        name = type(optimizer).__name__
        own = parameters_of(optimizer)
        dtypes = {parameter.dtype for parameter in own}
        half = bool(dtypes & {torch.float16, torch.bfloat16})
        if half and self.form.masters and not getattr(optimizer, "master_weights", False):
            raise ValueError(
                f"{self.name} needs FP32 master weights, and {name} keeps none; valid: "
                f"LARS(..., master_weights=True) or MasterWeights({name}(...))"
            )
        known = {parameter for model in self._statistics.models for parameter in model.parameters()}
        if self.form.casts_parameters and not half and not known.issuperset(own):  # norm layers
            raise ValueError(
                f"{self.name} needs half-precision parameters, and the optimizer has none; "
                "call precision.convert(model)"
            )
        if self.scales and torch.float16 in dtypes and not divides_gradients(optimizer):
            raise ValueError(
                f"{name} cannot unscale FP16 gradients; valid: LARS, MasterWeights({name}(...)), "
                "or loss_scale='none'"
            )
        self._checked.add(optimizer)

    def _remember(self) -> None:
        if self.scales:
            self._statistics.remember()

    def _too_many(self, steps: int) -> GradientOverflowError:
        return GradientOverflowError(
            f"{steps} steps in a row were skipped: gradients are not finite at loss scale "
            f"{self.loss_scale:g}; {affected(self._statistics.models)}"
        )


def _skips(model: nn.Module, skipped: dict[Optimizer, Tensor]) -> Tensor | None:
    """Whether an optimizer of a model's parameters was skipped, 0-d; None without loss scaling."""
    own = {id(parameter) for parameter in model.parameters()} if len(skipped) > 1 else set()
    flags = [
        flag
        for optimizer, flag in skipped.items()
        if any(id(parameter) in own for parameter in parameters_of(optimizer))
    ] or list(skipped.values())
    return any_of(flags) if flags else None


def auto_precision(device_type: str) -> str:
    """Return the fastest name of ``fp32`` and ``bf16`` on this machine, ``"cuda"`` or ``"cpu"``.

    BF16 where the GPU has it, or the CPU (AVX512-BF16, and AMX, which never comes without it):
    others compute it in FP32, with conversions besides.
    """
    if device_type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bf16 = torch.cpu._is_avx512_bf16_supported()
    return "bf16" if has_bf16 else "fp32"
