"""The DDP communication hook that reduces each gradient bucket as the plan says.

DDP calls the hook on a bucket when its gradients are ready and goes on with backward, so what
the hook starts must not hold that up: on gloo it runs on a thread of its own, on NCCL on a
stream of its own.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .execute import all_reduce
from .plan import Plan
from .topology import Topology

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
else:
    GradBucket = dist.GradBucket


def register(model: DistributedDataParallel, plan: Plan, topology: Topology) -> None:
    """Have ``model`` average its gradients over all ranks as ``plan`` says.

    Every rank must call it, with the same plan. DDP's bucket sizes are fixed when it is built:
    pass it ``bucket_cap_mb=plan.bucket_cap_mb``.

    Raises:
        TopologyError: the plan has an algorithm that the layout of the ranks does not allow.

    Example::

        topology, plan = Topology.from_environment(), Plan.single("hierarchical")
        model = DistributedDataParallel(model, bucket_cap_mb=plan.bucket_cap_mb)
        register(model, plan, topology)
    """
    plan.check(topology)
    model.register_comm_hook(_Reducer(plan, topology), _hook)


def _hook(state: "_Reducer", bucket: GradBucket) -> Future[Tensor]:
    return state.reduce(bucket)


class _Reducer:
    def __init__(self, plan: Plan, topology: Topology) -> None:
        self._plan = plan
        self._topology = topology
        # The back end overlaps its own all-reduce. Where anything else is in the plan, all goes
        # one way, so that collectives start in the same order on all ranks.
        self._plain = all(r.algorithm == "ring" and r.wire_dtype is None for r in plan.rules)
        if not self._plain:
            plan.connect(topology)  # here, where all ranks meet, not in the first backward
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """The future of the bucket's buffer, averaged over all ranks in place."""
        gradients = bucket.buffer()
        size_bytes = gradients.numel() * gradients.element_size()
        rule = self._plan.rule_for(size_bytes)
        world_size = self._topology.world_size

        if self._plain:  # what DDP does without a hook
            work = dist.all_reduce(gradients.div_(world_size), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        def average() -> Tensor:
            # Divided before the sum, which could overflow in half precision.
            all_reduce(gradients.div_(world_size), self._topology, rule)
            return gradients

        where = (
            f"rank {self._topology.rank}: {rule.algorithm} all-reduce of bucket {bucket.index()} "
            f"({size_bytes} bytes)"
        )
        run = self._on_stream if gradients.is_cuda else self._on_thread
        return run(average, gradients.device, where)

    def _on_thread(
        self, average: Callable[[], Tensor], device: torch.device, where: str
    ) -> Future[Tensor]:
        if self._thread is None:
            # One thread: buckets are reduced in the order in which all ranks hand them over.
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="largebatch-all-reduce")
        ended: Future[Tensor | Exception] = Future()

        def run() -> None:
            try:
                ended.set_result(average())
            except Exception as error:
                ended.set_result(RuntimeError(f"{where} failed: {error}"))

        def result(future: Future[Tensor | Exception]) -> Tensor:
            value = future.value()
            if isinstance(value, Exception):
                raise value  # reaches backward as it is, unlike Future.set_exception
            return value

        self._thread.submit(run)
        return ended.then(result)

    def _on_stream(
        self, average: Callable[[], Tensor], device: torch.device, where: str
    ) -> Future[Tensor]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        future: Future[Tensor] = Future(devices=[device])
        with torch.cuda.stream(self._stream):
            # Collectives wait on this stream alone; the future records where it stands, and DDP
            # has the compute stream wait for that only when backward is over.
            try:
                future.set_result(average())
            except Exception as error:
                raise RuntimeError(f"{where} failed: {error}") from error
        return future
