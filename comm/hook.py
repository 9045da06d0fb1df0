"""The DDP communication hook, which reduces each gradient bucket by the rule of the plan.

DDP calls the hook on a bucket when its gradients are ready and continues with backward, so the
hook must not block: on gloo it reduces on a separate thread, on NCCL on a separate stream. The
future of a bucket completes when its reduced gradients are available; the compute stream waits for
it only at the end of backward. (A hook that waits for its collectives on the compute stream, or
copies back in ``Future.then``, whose stream has already waited, loses the overlap.)
"""

import concurrent.futures
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .bucket_pipeline import BucketPipeline
from .execute import all_reduce
from .failure.roll_call import CollectiveError, describe_missing_ranks, join_roll_call
from .launch_order import check_launch_order
from .plan import Plan, Rule
from .topology import Topology

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
else:
    GradBucket = dist.GradBucket


def register(model: DistributedDataParallel, plan: Plan, topology: Topology) -> None:
    """Make ``model`` average its gradients over all ranks according to ``plan``.

    Every rank must call it with the same plan. DDP fixes its bucket sizes on construction, so
    pass it ``**plan.ddp_options()``.

    A plan of nothing but ``ring`` without a wire dtype is what DDP does by itself. Except on gloo,
    DDP is then left as it is: a hook in Python would cost time on the host for each bucket, and a
    pass over the gradients, which DDP divides while it copies them into the bucket.

    Gradients are divided by the number of ranks before the sum, so that half precision does not
    overflow. If a collective fails, backward raises :class:`CollectiveError`, which names the
    rank, the bucket and any missing ranks; the remaining buckets are not attempted. On NCCL most
    failures do not reach Python: torch's watchdog ends the process.

    Raises:
        TopologyError: an algorithm of the plan does not support the layout of the ranks.
        PlanError: the plan can deadlock on NCCL without ``NCCL_LAUNCH_ORDER_IMPLICIT=1``.

    Example::

        topology, plan = Topology.from_environment(), Plan.single("hierarchical")
        model = DistributedDataParallel(model, **plan.ddp_options())
        register(model, plan, topology)
    """
    plan.check(topology)
    if plan.is_plain and dist.get_backend(model.process_group) != "gloo":
        join_roll_call()
        return
    check_launch_order(model, plan, topology)
    model.register_comm_hook(_Reducer(plan, topology), _hook)


def _hook(state: "_Reducer", bucket: GradBucket) -> Future[Tensor]:
    return state.reduce(bucket)


class _Reducer:
    def __init__(self, plan: Plan, topology: Topology) -> None:
        self._plan = plan
        self._topology = topology
        # The back end overlaps its own all-reduce. If the plan has anything else, all buckets take
        # the same path, so that collectives start in the same order on all ranks.
        self._plain = plan.is_plain
        if not self._plain:
            plan.connect(topology)  # all ranks are here now; not so in the first backward
        self._pipeline: BucketPipeline | None = None
        self._stream: torch.cuda.Stream | None = None
        self._failure: CollectiveError | None = None
        join_roll_call()

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Average the bucket's buffer over all ranks in place; return its future."""
        gradients = bucket.buffer()
        size_bytes = gradients.numel() * gradients.element_size()
        rule = self._plan.rule_for(size_bytes)
        where = (
            f"rank {self._topology.rank}: {rule.algorithm} all-reduce of bucket {bucket.index()} "
            f"({size_bytes} bytes)"
        )
        if self._plain:  # the same as DDP without a hook, except for the error
            return self._by_the_back_end(gradients, where)
        run = self._on_stream if gradients.is_cuda else self._on_thread
        return run(gradients, rule, where)

    def _by_the_back_end(self, gradients: Tensor, where: str) -> Future[Tensor]:
        def result(done: Future[list[Tensor]]) -> Tensor:
            try:
                return done.value()[0]
            except Exception as error:
                raise self._first_failure(error, where) from error

        try:
            work = dist.all_reduce(gradients.div_(self._topology.world_size), async_op=True)
        except Exception as error:
            raise self._first_failure(error, where) from error
        return work.get_future().then(result)

    def _on_thread(self, gradients: Tensor, rule: Rule, where: str) -> Future[Tensor]:
        if self._pipeline is None:
            self._pipeline = BucketPipeline(self._topology)
        ended: Future[Tensor | Exception] = Future()

        def prepare() -> None:
            if self._failure:  # otherwise each bucket would wait for its own timeout
                raise self._failure
            # Divide before the sum, which could overflow in half precision.
            gradients.div_(self._topology.world_size)

        def done(summed: concurrent.futures.Future[None]) -> None:
            error = summed.exception()
            failure = isinstance(error, Exception) and self._first_failure(error, where)
            ended.set_result(failure or gradients)

        def result(future: Future[Tensor | Exception]) -> Tensor:
            value = future.value()
            if isinstance(value, Exception):
                raise value  # reaches backward unchanged, unlike with Future.set_exception
            return value

        self._pipeline.submit(gradients, rule, prepare).add_done_callback(done)
        return ended.then(result)

    def _on_stream(self, gradients: Tensor, rule: Rule, where: str) -> Future[Tensor]:
        device = gradients.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        future: Future[Tensor] = Future(devices=[device])
        with torch.cuda.stream(self._stream):
            # Only this stream waits for the collectives. The future records an event on it, and
            # DDP makes the compute stream wait for that event only at the end of backward.
            try:
                future.set_result(self._average(gradients, rule))
            except Exception as error:
                raise self._first_failure(error, where) from error
        return future

    def _average(self, gradients: Tensor, rule: Rule) -> Tensor:
        # Divide before the sum, which could overflow in half precision.
        all_reduce(gradients.div_(self._topology.world_size), self._topology, rule)
        return gradients

    def _first_failure(self, error: Exception, where: str) -> Exception:
        """Return the error to raise: the first failure, with its place and any missing ranks."""
        if self._failure is None:
            missing = describe_missing_ranks()
            self._failure = CollectiveError(
                f"{where} failed: {error}" + (f"; {missing}" if missing else "")
            )
        return self._failure
