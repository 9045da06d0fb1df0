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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .collectives import DONE, Pending
from .execute import all_reduce, independent_phases
from .node_memory import IN_FLIGHT
from .plan import Rule
from .ranges import ranged
from .topology import Topology


@dataclass(eq=False)
class _Bucket:
    """A bucket, and the future that completes when it has been reduced."""

    tensor: Tensor
    rule: Rule
    prepare: Callable[[], object]
    summed: Future[None]
    name: str = ""
    unfinished: int = 0


@dataclass(eq=False)
class _Chunk:
    """A chunk in flight; ``phase`` counts the phases that it has started."""

    bucket: _Bucket
    name: str
    phases: Iterator[Pending]
    phase: int = 0
    pending: Pending = DONE
    _ended: Any = None

    def is_ready(self) -> bool:
        """Whether its last phase has ended."""
        return self._ended is None or bool(self._ended.done())

    def advance(self, wake: Callable[[object], None]) -> bool:
        """Start the next phase; return whether there was one."""
        self.pending.wait()  # raises if the operation has failed
        with ranged(self.name):
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
        # Only the thread uses these, each from the oldest to the newest.
        self._submitted: deque[_Bucket] = deque()  # not done yet
        self._waiting: deque[_Bucket] = deque()  # not begun yet
        self._entering: deque[_Chunk] = deque()
        self._running: list[_Chunk] = []
        self._at: _Bucket | None = None  # worked on at present
        self._failure: Exception | None = None

    def submit(
        self,
        tensor: Tensor,
        rule: Rule,
        prepare: Callable[[], object] = lambda: None,
        name: str = "all-reduce",
    ) -> Future[None]:
        """Sum ``tensor`` over all ranks in place by ``rule``; see :func:`all_reduce`.

        If one fails, so do all that are not done and all that are submitted later, with the same
        exception: ranks may have got to different phases, and their next operations would not
        match. The future of the one that failed is the first to complete.

        Args:
            prepare: called on the thread before the tensor is read.
            name: what profilers call it.

        Returns:
            A future that completes on the thread, when the sum is available.
        """
        bucket = _Bucket(tensor, rule, prepare, Future(), name)
        self._thread.submit(self._enter, bucket)
        return bucket.summed

    def _enter(self, bucket: _Bucket) -> None:
        if self._failure is not None:
            bucket.summed.set_exception(self._failure)
            return
        self._submitted.append(bucket)
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
            self._at = None  # not kept until the next backward
        except Exception as error:
            self._failure = error
            failed = sorted(self._submitted, key=lambda bucket: bucket is not self._at)
            for queue in (self._submitted, self._waiting, self._entering, self._running):
                queue.clear()
            for bucket in failed:
                bucket.summed.set_exception(error)

    def _step(self) -> bool:
        """Do one thing; return whether there was one to do."""
        for index, chunk in enumerate(self._running):
            before = self._running[index - 1] if index else None
            if chunk.is_ready() and (before is None or before.phase > chunk.phase):
                self._at = chunk.bucket
                if not chunk.advance(self._wake):
                    del self._running[index]
                    self._count_down(chunk.bucket)
                return True
        if self._entering:
            if len(self._running) == IN_FLIGHT:
                return False
            chunk = self._entering.popleft()
            self._running.append(chunk)
            self._at = chunk.bucket
            chunk.advance(self._wake)
            return True
        return bool(self._waiting) and self._begin(self._waiting[0])

    def _begin(self, bucket: _Bucket) -> bool:
        """Begin with a bucket; return False if it has to wait for the chunks in flight."""
        self._at = bucket
        chunks = independent_phases(bucket.tensor, self._topology, bucket.rule)
        if chunks is None and self._running:
            return False
        self._waiting.popleft()
        with ranged(bucket.name):
            bucket.prepare()
            if chunks is None:
                all_reduce(bucket.tensor, self._topology, bucket.rule)
        independent = chunks or []
        for number, phases in enumerate(independent, 1):
            name = f"{bucket.name}, chunk {number} of {len(independent)}"
            self._entering.append(_Chunk(bucket, name, phases))
        bucket.unfinished = len(chunks or (None,))
        if chunks is None:
            self._count_down(bucket)
        return True

    def _count_down(self, bucket: _Bucket) -> None:
        bucket.unfinished -= 1
        if not bucket.unfinished:
            self._submitted.remove(bucket)
            bucket.summed.set_result(None)
