"""A pipeline through which all buckets of a backward pass go without a pause between them.

A bucket whose chunks have all been started makes room for the next one at once: the first chunk of
a bucket is summed inside the nodes while the last of the bucket before still crosses between them.

Buckets become ready at other times on each rank, so one rank may have started a chunk that another
does not have yet. All stay consistent because a chunk starts each phase after the chunk before it
has started that phase, so that the operations of each process group start in the same order
everywhere, and because the thread never waits for one operation: it goes on with whichever ends
first. Each operation therefore depends on earlier ones alone, and no cycle of waiting can arise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .collectives import DONE, Pending
from .execute import all_reduce, independent_phases
from .node_memory import IN_FLIGHT
from .plan import Rule
from .topology import Topology


@dataclass
class _Bucket:
    """A bucket, and what to call with None or an exception when it has been reduced."""

    tensor: Tensor
    rule: Rule
    prepare: Callable[[], None]
    done: Callable[[Exception | None], None]
    unfinished: int = 0


@dataclass
class _Chunk:
    """A chunk in flight; ``phase`` counts the phases that it has started."""

    bucket: _Bucket
    phases: Iterator[Pending]
    phase: int = 0
    pending: Pending = DONE
    _ended: Any = field(default=None)

    def is_ready(self) -> bool:
        """Whether its last phase has ended."""
        return self._ended is None or bool(self._ended.done())

    def advance(self, wake: Callable[[object], None]) -> bool:
        """Start the next phase; return whether there was one."""
        self.pending.wait()  # raises if the operation has failed
        pending = next(self.phases, None)
        if pending is None:
            return False
        self.phase, self.pending, self._ended = self.phase + 1, pending, None
        if pending is not DONE:
            work: Any = pending
            self._ended = work.get_future()
            self._ended.add_done_callback(wake)
        return True


class BucketPipeline:
    """Sums tensors over all ranks on a thread of its own, in the order of submission.

    Every rank must submit the same sizes with the same rules in the same order.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="largebatch-all-reduce")
        # Only the thread uses these.
        self._waiting: deque[_Bucket] = deque()
        self._entering: deque[_Chunk] = deque()
        self._running: list[_Chunk] = []  # oldest first

    def submit(
        self,
        tensor: Tensor,
        rule: Rule,
        done: Callable[[Exception | None], None],
        *,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Sum ``tensor`` over all ranks in place by ``rule``; see :func:`all_reduce`.

        After a failure the tensors that are in flight fail with the same exception.

        Args:
            done: called on the thread when the sum is available, with None, or with an exception.
            prepare: called on the thread before the tensor is read.
        """
        self._thread.submit(self._enter, _Bucket(tensor, rule, prepare, done))

    def _enter(self, bucket: _Bucket) -> None:
        self._waiting.append(bucket)
        self._advance()

    def _wake(self, _: object) -> None:
        with suppress(RuntimeError):  # the interpreter is shutting down
            self._thread.submit(self._advance)

    def _advance(self) -> None:
        """Start whatever can be started now."""
        try:
            while self._step():
                pass
        except Exception as error:
            failed = [chunk.bucket for chunk in (*self._running, *self._entering)]
            self._running.clear()
            self._entering.clear()
            if self._blocking is not None:
                failed.append(self._blocking)
            for bucket in {id(bucket): bucket for bucket in failed}.values():
                bucket.done(error)

    _blocking: _Bucket | None = None

    def _step(self) -> bool:
        """Do one thing; return whether there was one to do."""
        for index, chunk in enumerate(self._running):
            before = self._running[index - 1] if index else None
            if chunk.is_ready() and (before is None or before.phase > chunk.phase):
                if not chunk.advance(self._wake):
                    self._running.remove(chunk)
                    self._end(chunk.bucket)
                return True
        if self._entering and len(self._running) < IN_FLIGHT:
            chunk = self._entering.popleft()
            self._running.append(chunk)
            chunk.advance(self._wake)
            return True
        return not self._entering and bool(self._waiting) and self._open()

    def _open(self) -> bool:
        """Begin with the next bucket; return False if it has to wait for those in flight."""
        bucket = self._waiting[0]
        self._blocking = bucket
        chunks = independent_phases(bucket.tensor, self._topology, bucket.rule)
        if chunks is None and self._running:
            self._blocking = None
            return False
        self._waiting.popleft()
        bucket.prepare()
        if chunks is None:
            all_reduce(bucket.tensor, self._topology, bucket.rule)
            self._blocking = None
            bucket.done(None)
            return True
        bucket.unfinished = len(chunks)
        self._entering.extend(_Chunk(bucket, phases) for phases in chunks)
        self._blocking = None
        return True

    @staticmethod
    def _end(bucket: _Bucket) -> None:
        bucket.unfinished -= 1
        if not bucket.unfinished:
            bucket.done(None)
