"""The precisions by name: what is computed and what is held in which dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Form:
    """What a precision computes and holds.

    Attributes:
        compute: dtype of matrix products and convolutions.
        parameters: dtype of the parameters and their gradients, and so of what an all-reduce
            moves; norm layers stay in FP32.
        masters: whether the optimizer keeps an FP32 master of each parameter in half precision.
    """

    compute: torch.dtype
    parameters: torch.dtype = torch.float32
    masters: bool = False

    @property
    def casts_parameters(self) -> bool:
        """Whether a model must be converted."""
        return self.parameters != torch.float32


#: ``fp32``, ``bf16`` and ``fp16`` keep FP32 parameters; the half ones run under torch.autocast
#: (Micikevicius et al. 2018, arXiv 1710.03740). ``*-master`` hold parameters and gradients in half
#: precision and FP32 masters in the optimizer (Jia et al. 2018, arXiv 1807.11205, section on mixed
#: precision with LARS). ``fp16-pure`` has no masters: what those two papers warn of, to compare.
PRECISIONS: dict[str, Form] = {
    "fp32": Form(torch.float32),
    "bf16": Form(torch.bfloat16),
    "fp16": Form(torch.float16),
    "bf16-master": Form(torch.bfloat16, torch.bfloat16, masters=True),
    "fp16-master": Form(torch.float16, torch.float16, masters=True),
    "fp16-pure": Form(torch.float16, torch.float16),
}

#: The optimization levels of apex.amp, which apex has removed. Its O3 also put norm layers in FP16
#: unless told ``keep_batchnorm_fp32=True``, as it was for speed; here they stay in FP32.
OPT_LEVELS: dict[str, str] = {
    "O0": "fp32",
    "O1": "fp16",
    "O2": "fp16-master",
    "O3": "fp16-pure",
}


def form_name(name: str) -> str:
    """The name of a precision, given it or one of apex's.

    Raises:
        ValueError: there is no such precision.
    """
    name = OPT_LEVELS.get(name, name)
    if name not in PRECISIONS:
        valid = ", ".join([*PRECISIONS, *OPT_LEVELS])
        raise ValueError(f"precision {name!r} is not one of {valid}")
    return name
