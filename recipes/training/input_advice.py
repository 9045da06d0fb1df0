"""Advice for a run that spent much of its time waiting for data."""

from __future__ import annotations

from typing import Any

from ...pipeline import INPUT_BOUND, DataError, Loader, measure_input_times, stall_advice
from ..ranks import Job


def input_advice(summary: dict[str, Any], loader: Loader, job: Job) -> list[str]:
    """Return advice on the input of a finished run; empty if it hardly waited for its data.

    The first step's wait, in which the input starts up, does not count: a longer run would not
    repeat it. Times the stages of the input on some images of the run, for a few seconds.

    Args:
        summary: Summary of the run.
        loader: Loader of the training images.
        job: The ranks.

    Returns:
        The times of the stages in one line, then one line for each suggestion.
    """
    wait_share = summary["steady_wait_share"]
    if wait_share < INPUT_BOUND or loader.backend == "synthetic":
        return []
    try:
        times = measure_input_times(loader)
    except DataError as error:  # the run has succeeded all the same
        return [f"the stages of the input could not be timed: {error}"]
    images_per_second = summary["images_per_second"] / max(1 - summary["wait_share"], 0.01)
    return stall_advice(
        times,
        images_per_second=images_per_second * (1 - wait_share) / job.world_size,
        wait_share=wait_share,
        backend=loader.backend,
        threads=loader.threads,
        cores=loader.cores,
        on_gpu=job.device.type == "cuda",
    )
