"""The table of precisions: the dtypes of computation, parameters and master weights of each.

After Micikevicius et al. 2018 (arXiv 1710.03740), Jia et al. 2018 (arXiv 1807.11205) and apex.amp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .names import OPT_LEVELS


@dataclass(frozen=True)
class PrecisionForm:
    """The dtypes that a precision computes and stores.

    Attributes:
        compute: dtype of matrix products and convolutions.
        parameters: dtype of the parameters and their gradients, and therefore of the all-reduce.
            Norm layers stay in FP32.
        masters: whether the optimizer keeps an FP32 master of each half-precision parameter.
    """

    compute: torch.dtype
    parameters: torch.dtype = torch.float32
    masters: bool = False

    @property
    def casts_parameters(self) -> bool:
        """Whether the model must be converted to half-precision parameters."""
        return self.parameters != torch.float32


#: The precisions by name. ``fp32``, ``bf16`` and ``fp16`` keep FP32 parameters; the latter two run
#: under torch.autocast (Micikevicius et al. 2018, arXiv 1710.03740). ``bf16-master`` and
#: ``fp16-master`` store parameters and gradients in half precision and FP32 masters in the
#: optimizer (Jia et al. 2018, arXiv 1807.11205, section on mixed precision with LARS).
#: ``fp16-pure`` has no masters; both papers warn against it, and it is here for comparison.
PRECISIONS: dict[str, PrecisionForm] = {
    "fp32": PrecisionForm(torch.float32),
    "bf16": PrecisionForm(torch.bfloat16),
    "fp16": PrecisionForm(torch.float16),
    "bf16-master": PrecisionForm(torch.bfloat16, torch.bfloat16, masters=True),
    "fp16-master": PrecisionForm(torch.float16, torch.float16, masters=True),
    "fp16-pure": PrecisionForm(torch.float16, torch.float16),
}


def precision_name(name: str) -> str:
    """Return the name of a precision in ``PRECISIONS``, given that name or an apex level."""
    name = OPT_LEVELS.get(name, name)
    if name not in PRECISIONS:
        valid = ", ".join([*PRECISIONS, *OPT_LEVELS])
        raise ValueError(f"precision {name!r} is not one of {valid}")
    return name
