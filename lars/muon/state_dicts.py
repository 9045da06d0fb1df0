"""State dicts before they are loaded into Muon: checked before anything changes.

``torch.optim.Muon`` keeps the same moving average of gradients. It has one form of steps on
matrices, and the options of its groups are Muon's, but for ``eps``: it adds 1e-7 to norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..state_dicts import checked_state
from .options import DEFAULTS, check_options

_ADAMW = ("step", "exp_avg", "exp_avg_sq")
_STATE = ("momentum_buffer", "exp_avg", "exp_avg_sq", "step", "master")
_TORCH = {"momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "eps"}
# What a group has of timm's Muon and not of torch's; timm's mixes rules in one group.
_TIMM = {"algo", "conv_mode", "safety_factor"}


def converted(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a state dict that Muon can load; the argument stays as it is.

    Args:
        state_dict: of Muon or ``torch.optim.Muon``. Every rank has the whole state, whatever the
            number of ranks.
        groups: the optimizer's own groups.

    Raises:
        ValueError: it is for other parameters or of another optimizer, or its groups are updated
            by another rule, whose state is not interchangeable.
    """
    saved_groups = state_dict["param_groups"]
    sizes, saved_sizes = ([len(g["params"]) for g in of] for of in (groups, saved_groups))
    if sizes != saved_sizes:
        return dict(state_dict)  # the base class refuses it
    states, new_groups = dict(state_dict["state"]), []
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        saved = _group(index, group, saved)
        check_options(saved)
        pairs = list(zip(saved["params"], group["params"], strict=True))
        for number, parameter in pairs:
            if number in states:
                states[number] = checked_state(number, parameter, states[number] or {}, _STATE)
                missing = [name for name in _ADAMW if name not in states[number]]
                if 0 < len(missing) < len(_ADAMW):
                    raise ValueError(
                        f"the loaded state of parameter {number} has no {missing[0]!r}; valid: "
                        f"{', '.join(_ADAMW)}, or none of them"
                    )
        has_state = any(states.get(number) for number, _ in pairs)
        old, new = _rule(saved), _rule(group)
        if has_state and old != new:
            raise ValueError(
                f"param_groups[{index}] of the loaded state is updated by {old}, that of this "
                f"optimizer by {new}; their state is not interchangeable"
            )
        new_groups.append({**saved, "orthogonal": group["orthogonal"], "rule": group["rule"]})
    return {**state_dict, "state": states, "param_groups": new_groups}


def _group(index: int, group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return one loaded group in Muon's own form.

    What it lacks is the default in a group of Muon's, and as it is in this optimizer in one of
    torch's, which has no such options.
    """
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
