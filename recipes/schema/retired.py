"""Keys that recipes have no longer, in the recipe of a run of an earlier version.

The folder of a run and its checkpoints hold every key of their time. A retired one is dropped if it
has the value that it had by default, as training does that without it. With any other value the
run cannot be repeated or continued, and is refused.
"""

from __future__ import annotations

from typing import Any

from ..errors import RecipeError

#: The retired keys, with the values that they had by default.
RETIRED: dict[str, Any] = {
    **{"batch_norm.over": "micro-batch", "cuda_graph": False, "data.erasing_mode": "const"},
    **{"data.hw_decoder_load": "auto", "data.stages": [], "ema.every": 1, "ema.warmup": True},
    **{"mixing.prob": 1.0, "mixing.switch_prob": 0.5, "mlperf.cache_cleared": False},
    **{"mlperf.log": None, "mlperf.org": "unstated", "mlperf.platform": None},
    "mlperf.status": "research",
    "model.zero_init_last_norm": ...,  # any value: it is of weights before the first step
    **{"optimizer.denominator": "sum-of-norms", "optimizer.eps": 0.0},
    **{"optimizer.trust_clip": False, "profile.memory": False, "profile.shapes": False},
    **{"profile.stacks": False, "schedule.factor": 0.1, "stages[].micro_batch_size": None},
}
_GONE_SINCE = "0.1.0"


def without_retired(content: Any, prefix: str = "") -> Any:
    """The keys and values of a run's recipe without :data:`RETIRED` and sections that held no more.

    Raises:
        RecipeError: A retired key has another value than by default.
    """
    if isinstance(content, list):
        return [without_retired(entry, f"{prefix.removesuffix('.')}[].") for entry in content]
    if not isinstance(content, dict):
        return content
    found = {}
    for key, value in content.items():
        if (name := prefix + key) in RETIRED:
            if RETIRED[name] not in (value, ...):
                raise RecipeError(
                    f"{name}: {value!r} is of a run of an earlier version; the key is gone since "
                    f"{_GONE_SINCE}; valid: {RETIRED[name]!r}, which training does without it"
                )
        elif (kept := without_retired(value, f"{name}.")) or kept == value:
            found[key] = kept
    return found
