"""Whether a run waited for its data, and what would help."""

from __future__ import annotations

import os
from typing import Any

from ...pipeline import INPUT_BOUND, DataError, Loader, measure_input_times, stall_advice
from ..ranks import Job


def input_advice(summary: dict[str, Any], loader: Loader, job: Job) -> list[str]:
    """What would help a run that is input-bound; nothing for one that is not.

    Takes some images of the run through each stage of its input alone, for a few seconds.

    Args:
        summary: of the run.
        loader: its training images.
        job: its ranks.
    """
    if summary["wait_share"] < INPUT_BOUND or loader.backend == "synthetic":
        return []
    try:
        times = measure_input_times(loader)
    except DataError as error:  # the run is over and its results count
        return [f"the stages of its input could not be measured: {error}"]
    return stall_advice(
        times,
        images_per_second=summary["images_per_second"] / job.world_size,
        wait_share=summary["wait_share"],
        backend=loader.backend,
        threads=loader.threads,
        cores=max(1, len(os.sched_getaffinity(0)) // job.local_world_size),
        on_gpu=job.device.type == "cuda",
    )
