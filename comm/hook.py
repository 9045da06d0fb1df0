"""The DDP communication hook that reduces each gradient bucket as the plan says.

DDP calls the hook on a bucket when its gradients are ready and goes on with backward, so what
the hook starts must not hold that up: on gloo it runs on a thread of its own, on NCCL on a
stream of its own. Each bucket's future is done when its gradients are there: the compute stream
waits for it when backward is over. (A hook that waits for its collectives on the compute stream,
or copies back in ``Future.then``, which runs on a stream that has waited, loses the overlap.)
"""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .execute import all_reduce
from .failure.roll_call import CollectiveError, join, verdict
from .plan import Plan, Rule
from .topology import Topology

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
else:
    GradBucket = dist.GradBucket


def register(model: DistributedDataParallel, plan: Plan, topology: Topology) -> None:
    """Have ``model`` average its gradients over all ranks as ``plan`` says.

    Every rank must call it, with the same plan. DDP's bucket sizes are fixed when it is built:
    pass it ``**plan.ddp_options()``.

    Gradients are divided by the number of ranks before they are summed, so that sums of half
    precision do not overflow. A collective that fails ends backward with an error that names the
    rank, the bucket, and the ranks that are missing, if any; buckets after it are not tried.

    Raises:
        TopologyError: the plan has an algorithm that the layout of the ranks does not allow.

    Example::

        topology, plan = Topology.from_environment(), Plan.single("hierarchical")
        model = DistributedDataParallel(model, **plan.ddp_options())
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
        self._failure: CollectiveError | None = None
        join()

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """The future of the bucket's buffer, averaged over all ranks in place."""
        gradients = bucket.buffer()
        size_bytes = gradients.numel() * gradients.element_size()
        rule = self._plan.rule_for(size_bytes)
        where = (
            f"rank {self._topology.rank}: {rule.algorithm} all-reduce of bucket {bucket.index()} "
            f"({size_bytes} bytes)"
        )
        if self._plain:  # what DDP does without a hook
            return self._by_the_back_end(gradients, where)
        run = self._on_stream if gradients.is_cuda else self._on_thread
        return run(gradients, rule, where)

    def _by_the_back_end(self, gradients: Tensor, where: str) -> Future[Tensor]:
        def result(done: Future[list[Tensor]]) -> Tensor:
            try:
                return done.value()[0]
            except Exception as error:
                raise self._told(error, where) from error

        try:
            work = dist.all_reduce(gradients.div_(self._topology.world_size), async_op=True)
        except Exception as error:
            raise self._told(error, where) from error
        return work.get_future().then(result)

    def _on_thread(self, gradients: Tensor, rule: Rule, where: str) -> Future[Tensor]:
        if self._thread is None:
            # One thread: buckets are reduced in the order in which all ranks hand them over.
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="largebatch-all-reduce")
        ended: Future[Tensor | Exception] = Future()

        def run() -> None:
            try:
                if self._failure:  # each would fail after a time-out of its own
                    raise self._failure
                ended.set_result(self._averaged(gradients, rule))
            except Exception as error:
                ended.set_result(self._told(error, where))

        def result(future: Future[Tensor | Exception]) -> Tensor:
            value = future.value()
            if isinstance(value, Exception):
                raise value  # reaches backward as it is, unlike Future.set_exception
            return value

        self._thread.submit(run)
        return ended.then(result)

    def _on_stream(self, gradients: Tensor, rule: Rule, where: str) -> Future[Tensor]:
        device = gradients.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        future: Future[Tensor] = Future(devices=[device])
        with torch.cuda.stream(self._stream):
            # Collectives wait on this stream alone; the future records where it stands, and DDP
            # has the compute stream wait for that only when backward is over.
            try:
                future.set_result(self._averaged(gradients, rule))
            except Exception as error:
                raise self._told(error, where) from error
        return future

    def _averaged(self, gradients: Tensor, rule: Rule) -> Tensor:
        # Divided before the sum, which could overflow in half precision.
        all_reduce(gradients.div_(self._topology.world_size), self._topology, rule)
        return gradients

    def _told(self, error: Exception, where: str) -> Exception:
        """What is raised for ``error``: the first failure, with all that is known of it."""
        if self._failure is None:
            missing = verdict()
            self._failure = CollectiveError(
                f"{where} failed: {error}" + (f"; {missing}" if missing else "")
            )
        return self._failure
