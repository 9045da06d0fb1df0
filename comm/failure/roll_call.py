"""Name the missing ranks when a collective fails.

A back end's error names at best an address ("Connection closed by peer [10.0.0.7]:4242"), and a
rank that waits for a dead one may only time out. The ranks on which a collective fails call the
roll instead (:mod:`.roll`), which takes seconds. They do so too, on a thread of its own, when
torchrun ends the ranks of a node by SIGTERM because one of them has ended.

The store must be torch's TCPStore, which torchrun, ``env://`` and ``tcp://`` use. torchrun's
outlives the ranks. Otherwise rank 0 hosts it, and no roll can be called once rank 0 has ended; the
error message then says so.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import groupby

import torch.distributed as dist

from .roll import GRACE_SECONDS, LEFT, RollCall
from .sigterm import on_sigterm


class CollectiveError(RuntimeError):
    """Raised for a failed collective; the message names the rank and any missing ranks."""

    ranks: Sequence[int] = ()  #: The missing ranks, ascending.
    #: What is known of them, such as ``rank 3 did not answer within 3 s (ended or hanging)``, or
    #: that the job's store does not answer; empty where all ranks do.
    missing = ""


@contextmanager
def missing_ranks_named() -> Iterator[None]:
    """Add the missing ranks to the error of a collective that fails inside this context.

    Every rank of the job must enter it after ``init_process_group``, and is found by roll calls
    while inside. A rank that receives SIGTERM, which torchrun sends to the other ranks of a node
    when one has ended, prints a line with the missing ranks on standard error. With none, as when
    the whole job is ended, it prints nothing. Then the signal does what it did before.

    Raises:
        CollectiveError: a RuntimeError, such as that of a failed collective, occurred while ranks
            were missing; or a hook of :func:`register` raised it during backward, where torch wraps
            it in a RuntimeError. The original error is its cause.

    Example::

        dist.init_process_group("gloo")
        with missing_ranks_named():
            train()
    """
    caller = join_roll_call()
    state: tuple[str, ...] = ()
    try:
        with on_sigterm(lambda: _name_at_sigterm(caller)) if caller else nullcontext():
            try:
                yield
                state = (LEFT,)
            except SystemExit:
                state = (LEFT,)
                raise
            except RuntimeError as error:
                if isinstance(complete := with_missing_ranks(error), CollectiveError):
                    raise complete from error
                raise
    finally:
        _leave(*state)


def with_missing_ranks(error: RuntimeError) -> RuntimeError:
    """Return the error to raise in place of one of a collective; itself if all ranks answer.

    Takes seconds. SIGTERM is ignored meanwhile: torchrun sends it to all ranks of a node as soon as
    one has ended.
    """
    on_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN) if on_main else None
    caller = None
    try:
        with suppress(RuntimeError):  # the store has ended
            caller = join_roll_call()
        if caller is not None:
            caller.is_naming = True
        missing = describe_missing_ranks()
    finally:
        if on_main:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    text = str(error)
    if not isinstance(error, CollectiveError):
        # torch wraps the error of a future's callback, such as that of a hook, in a RuntimeError:
        # "Got the following error when running the callback: CollectiveError: …\n\nAt:\n …".
        text = text.partition(f"{CollectiveError.__name__}: ")[2].partition("\n\nAt:")[0]
        if not (text or missing):
            return error
        text = text or f"rank {dist.get_rank()}: {error}"
    complete = CollectiveError(text if missing in text else f"{text}; {missing}")
    complete.missing, complete.ranks = missing, caller.known if caller else ()
    return complete


def described_failure(where: str, error: Exception) -> CollectiveError:
    """Return the error to raise for a failed collective, with the ranks that are missing."""
    said = [f"{where} failed: {error}", describe_missing_ranks()]
    return CollectiveError("; ".join(filter(None, said)))


def describe_missing_ranks() -> str:
    """Call the roll and describe the missing ranks; empty if there are none, or without a store."""
    try:
        caller = join_roll_call()
    except RuntimeError:  # the store has ended before this rank has joined
        roll = None
    else:
        if caller is None:
            return ""
        named, caller.is_naming = caller.is_naming, True
        roll = caller.call()
    if roll is None or caller is None:
        host = "torchrun's agent on the first node" if _an_agent_is_host() else "rank 0"
        return (
            f"{host} has ended or cannot be reached: it hosts the job's store, which does not "
            "answer"
        )
    caller.is_naming = named or bool(roll.missing)
    return described(roll.missing)


def _an_agent_is_host() -> bool:
    """Whether torchrun's agent hosts the job's store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _name_at_sigterm(caller: RollCall) -> bool:
    """Print the missing ranks after SIGTERM, if any; whether the process may end by it."""
    roll = caller.call(is_terminated=True)
    if caller.has_ended or caller.is_naming:  # the main thread is about to raise an error of it
        return caller.has_ended
    if roll is not None and roll.missing:
        line = f"rank {caller.rank}: received SIGTERM; {described(roll.missing)}"
        print(line, file=sys.stderr, flush=True)
    return True


def described(missing: Sequence[int], grace_seconds: float = GRACE_SECONDS) -> str:
    """Describe ranks that did not answer; empty if there are none."""
    if not missing:
        return ""
    return f"{ranks_named(missing)} did not answer within {grace_seconds:g} s (ended or hanging)"


def ranks_named(numbers: Sequence[int]) -> str:
    """Return ascending ranks in words: ``rank 3``, ``ranks 0 and 2``, ``ranks 0 to 6 and 9``."""
    words: list[str] = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        first, *more = (number for _, number in run)
        words += [f"{first} to {more[-1]}"] if len(more) > 1 else map(str, (first, *more))
    listed = " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return f"ranks {listed}" if len(numbers) > 1 else f"rank {listed}"


_lock = threading.Lock()
_joined: RollCall | None = None


def join_roll_call() -> RollCall | None:
    """Make this rank answer roll calls; every rank must call it.

    Returns:
        The means to call the roll; None for a single rank, and without a TCPStore.
    """
    global _joined
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = below = dist.distributed_c10d._get_default_store()
    with _lock:
        # The store changes when the process group is destroyed and made anew.
        if _joined is None or _joined.store is not store:
            while isinstance(below, dist.PrefixStore):
                below = below.underlying_store
            if not isinstance(below, dist.TCPStore):
                return None
            if _joined is not None:
                _joined.end()
            rank = dist.get_rank()
            is_host = rank == 0 and not _an_agent_is_host()
            _joined = RollCall(store, rank, dist.get_world_size(), is_host=is_host)
            leave = weakref.finalize(dist.group.WORLD, _joined.leave)
            leave.atexit = False  # the end of the process, in whatever order, is not waited for
        return _joined


def _leave(*state: str) -> None:
    global _joined
    with _lock:
        if _joined is not None:
            _joined.end(*state)
        _joined = None
