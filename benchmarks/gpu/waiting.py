"""Whether the host waits for the device, which no step of training may do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.gpu import clock


@contextmanager
def host_syncs_fail() -> Iterator[None]:
    """Raise where the host waits for the device, as far as torch detects it."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def check_that_syncs_fail(device: torch.device) -> None:
    value = torch.ones((), device=device)
    with host_syncs_fail():
        try:
            value.item()
        except RuntimeError:
            return
    raise AssertionError("torch did not detect a host sync, so this check is impossible here")


def does_not_wait(step: Callable[[], object], device: torch.device) -> None:
    """Check that ``step`` returns while the device is still busy with earlier work.

    This detects every way of waiting, but also fails a step of about a thousand kernels, which
    waits for room in the queue.
    """
    torch.cuda.synchronize(device)
    clock.sleep(0.3, device)
    busy = torch.cuda.Event()
    busy.record()
    with host_syncs_fail():
        step()
    waited = busy.query()
    torch.cuda.synchronize(device)
    assert not waited, "the host waited until the device had finished its earlier work"
