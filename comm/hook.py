"""The DDP communication hook, which reduces each gradient bucket by the rule of the plan.

DDP calls the hook on a bucket when its gradients are ready and continues with backward, so the
hook must not block: on gloo it reduces on a separate thread, on NCCL on a separate stream. The
future of a bucket completes when its reduced gradients are available; the compute stream waits for
it only at the end of backward. (A hook that waits for its collectives on the compute stream, or
copies back in ``Future.then``, whose stream has already waited, loses the overlap.)
"""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .averaging import Averaging, average
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

    A plan of nothing but ``ring`` without a wire dtype is what DDP does by itself. Except on gloo
    and with FP16 gradients, DDP is then left as it is: a hook in Python would cost time on the host
    for each bucket, and a pass over the gradients, which DDP divides while it copies them into the
    bucket.

    Gradients are divided by the number of ranks as :func:`~largebatch.comm.average` does. DDP alone
    would divide FP16 gradients before their sum, and is therefore not left to average them.

    If a collective fails, backward raises :class:`CollectiveError`, which names the rank, the
    bucket and any missing ranks; the remaining buckets are not attempted. On NCCL most failures do
    not reach Python: torch's watchdog ends the process.

    Raises:
        TopologyError: an algorithm of the plan does not support the layout of the ranks.
        PlanError: the plan can deadlock on NCCL without ``NCCL_LAUNCH_ORDER_IMPLICIT=1``.

    Example::

        topology, plan = Topology.from_environment(), Plan.single("hierarchical")
        model = DistributedDataParallel(model, **plan.ddp_options())
        register(model, plan, topology)
    """
    plan.check(topology)
    plain = plan.is_plain and not _has_fp16_gradients(model)
    if plain and dist.get_backend(model.process_group) != "gloo":
        join_roll_call()
        return
    check_launch_order(model, plan, topology)
    model.register_comm_hook(_Reducer(plan, topology), _hook)


def _has_fp16_gradients(model: DistributedDataParallel) -> bool:
    return any(p.requires_grad and p.dtype == torch.float16 for p in model.parameters())


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
        self._thread: ThreadPoolExecutor | None = None
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
            return self._by_the_back_end(gradients, rule, where)
        run = self._on_stream if gradients.is_cuda else self._on_thread
        return run(gradients, rule, where)

    def _by_the_back_end(self, gradients: Tensor, rule: Rule, where: str) -> Future[Tensor]:
        averaging = Averaging.of(gradients.dtype, self._topology.world_size, rule)

        def result(done: Future[list[Tensor]]) -> Tensor:
            try:
                total = done.value()[0]
            except Exception as error:
                raise self._first_failure(error, where) from error
            return averaging.end(total)

        try:
            work = dist.all_reduce(averaging.begin(gradients), async_op=True)
        except Exception as error:
            raise self._first_failure(error, where) from error
        return work.get_future().then(result)

    def _on_thread(self, gradients: Tensor, rule: Rule, where: str) -> Future[Tensor]:
        if self._thread is None:
            # A single thread reduces buckets in the order of submission, the same on all ranks.
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="largebatch-all-reduce")
        ended: Future[Tensor | Exception] = Future()

        def run() -> None:
            try:
                if self._failure:  # otherwise each bucket would wait for its own timeout
                    raise self._failure
                ended.set_result(self._average(gradients, rule))
            except Exception as error:
                ended.set_result(self._first_failure(error, where))

        def result(future: Future[Tensor | Exception]) -> Tensor:
            value = future.value()
            if isinstance(value, Exception):
                raise value  # reaches backward unchanged, unlike with Future.set_exception
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
            # Only this stream waits for the collectives. The future records an event on it, and
            # DDP makes the compute stream wait for that event only at the end of backward.
            try:
                future.set_result(self._average(gradients, rule))
            except Exception as error:
                raise self._first_failure(error, where) from error
        return future

    def _average(self, gradients: Tensor, rule: Rule) -> Tensor:
        average(gradients, self._topology, rule)
        return gradients

    def _first_failure(self, error: Exception, where: str) -> Exception:
        """Return the error to raise: the first failure, with its place and any missing ranks."""
        if self._failure is None:
            missing = describe_missing_ranks()
            self._failure = CollectiveError(
                f"{where} failed: {error}" + (f"; {missing}" if missing else "")
            )
        return self._failure
