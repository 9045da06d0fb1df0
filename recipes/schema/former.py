"""Keys that recipes no longer have: what took their place, and how the recipe of an old run reads.

A recipe that sets one is refused with what to use instead. The recipe that an earlier version
wrote into a run's folder holds every key: there they move to their new place, or go.
"""

from __future__ import annotations

from typing import Any

#: Each key, and what a message says to do in its place.
FORMER_KEYS = {
    "batch_norm.over": "use batch_norm.images=N (ghost), or batch_norm.ranks=N (group) or all",
    "cuda_graph": "use compile=reduce-overhead",
    "data.hw_decoder_load": "it follows from the GPU, as largebatch.pipeline.Loader says",
    "ema.every": "the average is taken at every step",
    "ema.warmup": "the average warms up by itself",
    "mlperf": "use track=mlperf, and MLPERF_SUBMISSION_ORG and its like in the environment",
    "optimizer.denominator": "use optimizer.args.denominator",
    "optimizer.eps": "use optimizer.args.eps",
    "optimizer.trust_clip": "use optimizer.args.trust_clip",
    "profile.memory": "use torch.profiler in a callback of your own",
    "profile.shapes": "use torch.profiler in a callback of your own",
    "profile.stacks": "use torch.profiler in a callback of your own",
}

#: LARS's options that moved to ``optimizer.args``, with the defaults at which they need not.
_MOVED = {"denominator": "sum-of-norms", "eps": 0.0, "trust_clip": False}


def without_former_keys(content: dict[str, Any]) -> dict[str, Any]:
    """The recipe of a run of an earlier version, in today's keys."""
    found = _without(content, "")
    options, norm = content.get("optimizer"), content.get("batch_norm")
    if isinstance(options, dict) and options.get("name", "lars") == "lars":
        moved = {
            k: options[k] for k, default in _MOVED.items() if options.get(k, default) != default
        }
        if moved:
            found["optimizer"]["args"] = {**(options.get("args") or {}), **moved}
    if isinstance(norm, dict) and norm.get("over") == "global":
        found["batch_norm"]["ranks"] = "all"
    return found


def _without(content: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {
        key: _without(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in content.items()
        if f"{prefix}{key}" not in FORMER_KEYS
    }
