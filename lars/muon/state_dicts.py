"""State dicts before they are loaded into Muon: checked before anything changes.

``torch.optim.Muon`` keeps the same moving average of gradients. It has one form of steps on
matrices, and the options of its groups are Muon's, but for ``eps``: it adds 1e-7 to norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..options import check_options
from ..state_dicts import Loaded
from .options import DEFAULTS, RANGES

_ADAMW = ("step", "exp_avg", "exp_avg_sq")
STATE = ("momentum_buffer", "exp_avg", "exp_avg_sq", "step", "master")
_TORCH = {"momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "eps"}
# What a group has of timm's Muon and not of torch's; timm's mixes rules in one group.
_TIMM = {"algo", "conv_mode", "safety_factor"}


def loaded_group(
    index: int, group: Mapping[str, Any], saved: Mapping[str, Any], loaded: Sequence[Loaded]
) -> dict[str, Any]:
    """Return a group of a state dict of Muon or ``torch.optim.Muon`` in Muon's form.

    ValueError says that it is of another optimizer, or of another rule, whose state does not fit.
    """
    saved = _group(index, group, saved)
    check_options(saved, RANGES)
    for number, _, state in loaded:
        missing = [name for name in _ADAMW if name not in state]
        if 0 < len(missing) < len(_ADAMW):
            raise ValueError(
                f"the loaded state of parameter {number} has no {missing[0]!r}; valid: "
                f"{', '.join(_ADAMW)}, or none of them"
            )
    old, new = _rule(saved), _rule(group)
    if old != new and any(state for *_, state in loaded):
        raise ValueError(
            f"param_groups[{index}] of the loaded state is updated by {old}, that of this "
            f"optimizer by {new}; their state is not interchangeable"
        )
    return {**saved, "orthogonal": group["orthogonal"], "rule": group["rule"]}


def _group(index: int, group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a loaded group with Muon's defaults for what it lacks, or if torch's this group's."""
    if "orthogonal" in saved:
        return {**DEFAULTS, **saved}
    if not saved.keys() >= _TORCH or saved.keys() & _TIMM:
        raise ValueError(
            f"param_groups[{index}] of the loaded state has no 'orthogonal'; valid: state of "
            "largebatch's Muon or of torch.optim.Muon"
        )
    kept = {name: value for name, value in group.items() if name in DEFAULTS}
    options = {**kept, **saved, "orthogonal": True, "eps": None}
    options["adjust_lr_fn"] = saved["adjust_lr_fn"] or "original"
    return options


def _rule(group: Mapping[str, Any]) -> str:
    return "orthogonal steps" if group["orthogonal"] else group["rule"]
