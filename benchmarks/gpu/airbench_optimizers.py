"""The optimizers that are compared on airbench's network, as overrides of its recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass

RECIPE = "airbench-b256"

#: Batch size of the guessed learning rates.
GUESSED_AT = 2000


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of the comparison."""

    lr: float  # guess of the learning rate at a batch of :data:`GUESSED_AT`
    overrides: tuple[str, ...]  # its overrides of the recipe

    def guess(self, batch: int) -> float:
        """Return the learning rate that is tried first at a batch size: scaled by the root."""
        return self.lr * math.sqrt(batch / GUESSED_AT)


#: As in airbench94_muon (Keller Jordan 2024), for a loss that is a mean, and logits over 9: there a
#: sum over 2,000 images with a rate of 0.67 for the classifier, and logits over 256.
_MUON = "{adjust_lr_fn: none, norm_projection: true, ns_steps: 3, "
_MUON += (
    f"others: {{rule: sgd, lr_scale: {0.67 * 2000 * (9 / 256) ** 2 / 0.24:.3g}, momentum: 0.85}}}}"
)
OPTIMIZERS = {
    "Muon": Optimizer(
        0.24,
        (
            *("optimizer.name=muon", "optimizer.momentum=0.6", "optimizer.nesterov=true"),
            f"optimizer.args={_MUON}",
        ),
    ),
    # The recipe's rate, of airbench94, scaled linearly to 2,000. The biases are at the rate of the
    # other weights, in place of 64 times that.
    "Nesterov-1x": Optimizer(2.9, ("optimizer.bias_lr_scale=1",)),
    "LARS": Optimizer(
        4.0,
        (
            *("optimizer.name=lars", "optimizer.nesterov=false", "schedule.power=2"),
            *("optimizer.trust_coefficient=0.01", "optimizer.momentum=0.9"),
            *("optimizer.weight_decay=5e-4", "optimizer.bias_lr_scale=1"),
        ),
    ),
}
