"""The DDP communication hook, which reduces each gradient bucket by the rule of the plan.

DDP calls the hook on a bucket when its gradients are ready and continues with backward, so the
hook must not block: on gloo it reduces on a separate thread, on NCCL on a separate stream. The
compute stream waits for the future of a bucket only at the end of backward. (A hook that waits for
its collectives on the compute stream, or copies back in ``Future.then``, whose stream has already
waited, loses the overlap.)
"""

import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .averaging import Averaging, average
from .failure.roll_call import CollectiveError, described_failure, join_roll_call
from .launch_order import check_launch_order, nccl_class
from .plan import Plan, Rule
from .ranges import all_reduce_name, ranged
from .refusals import (
    check_bucket,
    check_join,
    check_model,
    check_one_model,
    models_of,
    require_ddp,
)
from .topology import Topology

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
else:
    GradBucket = dist.GradBucket


class PlanState:
    """The state of :func:`plan_hook`, in the form of the states of torch's own hooks.

    It can be made before the process group exists, and be pickled or copied at any time: the copy
    starts unconnected. Each model takes a state of its own, which also serves it when DDP wraps it
    again, as Lightning does at each ``fit``. A state of two models is refused in the first backward
    of either: their buckets would take turns in an order that may differ from rank to rank.

    The first bucket of the first backward connects and checks the model, on all ranks together. The
    ranks may not start collectives in one order where the graph differs between them and backward
    has collectives beside DDP's, as with batch norm over ranks: call :meth:`connect` before there.

    Args:
        plan: the same on all ranks. DDP fixes its bucket sizes on construction, so pass it
            ``**plan.ddp_options()``.
        topology: the nodes; None for those of :meth:`Topology.from_environment`. Process groups are
            made for this state alone, also where several states are given one topology.
    """

    _topology: Topology

    def __init__(self, plan: Plan, topology: Topology | None = None) -> None:
        self._plan = plan
        self._given = topology
        # The back end overlaps its own all-reduce. If the plan has anything else, all buckets take
        # the same path, so that collectives start in the same order on all ranks.
        self._plain = plan.is_plain
        self._world: dist.ProcessGroup | None = None  # the default group that this was made for
        self._connected = False
        self._models: list[weakref.ref[DistributedDataParallel]] | None = None
        self._parameters: set[int] = set()  # identities of those that are known to be the model's
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._failure: CollectiveError | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy without what belongs to this process, such as process groups."""
        return type(self), (self._plan, self._given and replace(self._given))

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self._plan

    @property
    def topology(self) -> Topology | None:
        """The nodes; None as long as they are neither given nor found."""
        return getattr(self, "_topology", self._given)

    def connect(self) -> None:
        """Find the topology and create the process groups; every rank must call it.

        On NCCL, call it after ``torch.cuda.set_device``. Later calls do nothing, unless the default
        process group was destroyed and made anew.

        Raises:
            TopologyError: there is no process group yet, it has other ranks than the topology, or
                an algorithm of the plan does not support the layout of the ranks.
        """
        self._find_topology()
        if self._connected:
            return
        if not self._plain:
            self._plan.connect(self._topology)
        join_roll_call()
        self._connected = True

    def _find_topology(self) -> None:
        world = dist.group.WORLD
        if world is self._world and world is not None:
            return
        # Its process groups and memory are those of this state, which reduces on its own thread.
        topology = Topology.of_job(self._given)
        topology = topology.in_default_group() if self._plain else topology
        self._plan.check(topology)
        self._topology, self._world = topology, world
        self._connected, self._failure = False, None
        self._thread = self._stream = None

    def _adopt(self, models: Sequence[DistributedDataParallel]) -> None:
        """Check the model that this state serves, in each of its wrappers, and connect."""
        check_one_model(models)
        self._find_topology()
        for model in models:
            check_model(model, self._topology)
            check_launch_order(model, self._plan, self._topology)
        self.connect()
        self._models = [weakref.ref(model) for model in models]
        self._parameters = {id(each) for model in models for each in model.parameters()}

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Average the bucket's buffer over all ranks in place; return its future."""
        self._prepare(bucket)
        gradients = bucket.buffer()
        size_bytes = gradients.numel() * gradients.element_size()
        rule = self._plan.rule_for(size_bytes)
        what = f"{rule.algorithm} all-reduce of bucket {bucket.index()} ({size_bytes} bytes)"
        where = f"rank {self._topology.rank}: {what}"
        name = all_reduce_name(bucket.index(), size_bytes, rule.algorithm)
        if gradients.is_cuda:
            return self._on_stream(gradients, rule, where, name)
        # The back end by itself is what DDP does without a hook, except for the error.
        run = self._by_the_back_end if self._plain else self._on_thread
        return run(gradients, rule, where, name)

    def _prepare(self, bucket: GradBucket) -> None:
        """Connect at the first bucket, and check at each what may change in between."""
        if self._may_have_another_model(bucket):
            self._adopt(models_of(self))
            self._parameters.update(map(id, bucket.parameters()))
        for reference in self._models or ():
            model = reference()
            if model is not None:
                check_join(model)

    def _may_have_another_model(self, bucket: GradBucket) -> bool:
        if self._models is None or self._world is not dist.group.WORLD:
            return True
        if any(reference() is None for reference in self._models):
            return True
        # Another model shows in its first bucket, by a parameter that is not known yet.
        is_first = bool(self._models) and bucket.index() == 0
        return is_first and any(id(p) not in self._parameters for p in bucket.parameters()[:1])

    def _by_the_back_end(
        self, gradients: Tensor, rule: Rule, where: str, name: str
    ) -> Future[Tensor]:
        averaging = Averaging.of(gradients.dtype, self._topology.world_size, rule)

        def result(done: Future[list[Tensor]]) -> Tensor:
            with self._described(where):
                return averaging.end(done.value()[0])

        with self._described(where), ranged(name):
            work = dist.all_reduce(averaging.begin(gradients), async_op=True)
        return work.get_future().then(result)

    def _on_thread(self, gradients: Tensor, rule: Rule, where: str, name: str) -> Future[Tensor]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "largebatch-all-reduce")
        topology, ended = self._topology, Future[Tensor]()

        def run() -> None:
            try:
                with self._described(where), ranged(name):
                    average(gradients, topology, rule)
                ended.set_result(gradients)
            except Exception as error:  # lost here otherwise, while DDP waits for the future
                ended.set_exception(error)  # type: ignore[arg-type]

        self._thread.submit(run)
        return ended.then(lambda done: done.value())  # by which DDP hears of an exception

    def _on_stream(self, gradients: Tensor, rule: Rule, where: str, name: str) -> Future[Tensor]:
        device = gradients.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        future: Future[Tensor] = Future(devices=[device])
        with torch.cuda.stream(self._stream), ranged(name), self._described(where):
            # Only this stream waits for the collectives. The future records an event on it, and
            # DDP makes the compute stream wait for that event only at the end of backward.
            average(gradients, self._topology, rule)
            future.set_result(gradients)
        return future

    @contextmanager
    def _described(self, where: str) -> Iterator[None]:
        """Raise the first failure in place of any error, with its place and any missing ranks."""
        if self._failure is not None:  # otherwise each bucket would wait for its own timeout
            raise self._failure
        try:
            yield
        except Exception as error:
            self._failure = self._failure or described_failure(where, error)
            raise self._failure from error


def plan_hook(state: PlanState, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket over all ranks by the plan of ``state``: a DDP communication hook.

    Its gradients are divided by the number of ranks as :func:`~largebatch.comm.average` does. Under
    torch's ``fp16_compress_wrapper`` or ``bf16_compress_wrapper`` the bucket is in half precision
    already: the plan's rules then see half the bytes, and a wire dtype in them adds nothing.

    Args:
        state: that of the model.
        bucket: DDP's; its buffer, 1-d and of any floating-point dtype, is overwritten.

    Returns:
        The future of the buffer.

    Raises:
        PlanError: on the first bucket, as :func:`register` does; if ``state`` is registered with
            another model, too; or inside ``join(divide_by_initial_world_size=False)``.
        TopologyError: on the first bucket, as :func:`register` does.
        RuntimeError: backward raises it if a collective fails, with the message of a
            :class:`CollectiveError` in its own, which names the rank, the bucket and any missing
            ranks; the remaining buckets are not attempted. On NCCL most failures do not reach
            Python: torch's watchdog ends the process.

    Example::

        plan = Plan.single("hierarchical")
        model = DistributedDataParallel(model, **plan.ddp_options())
        model.register_comm_hook(PlanState(plan), plan_hook)
    """
    check_bucket(bucket)
    return state.reduce(bucket)


def register(model: DistributedDataParallel, plan: Plan, topology: Topology | None = None) -> None:
    """Make ``model`` average its gradients over all ranks according to ``plan``.

    It registers :func:`plan_hook` with a :class:`PlanState`, which it connects and checks at once;
    every rank must call it. What DDP does by itself, ``ring`` without a wire dtype, is left to it
    on torch's ProcessGroupNCCL: a hook costs time on the host for each bucket, and a pass over the
    gradients. Not for FP16 gradients, which DDP would divide by all ranks before their sum, nor on
    ProcessGroupNCCL2, where DDP by itself does not overlap with backward.

    Args:
        model: DDP over all ranks, made with ``**plan.ddp_options()``; it may be compiled.
        plan: the same on all ranks.
        topology: the nodes; None for those of :meth:`Topology.from_environment`.

    Raises:
        TopologyError: an algorithm of the plan does not support the layout of the ranks, or the
            process group has other ranks.
        PlanError: the model is not DDP over all ranks with buckets, or the plan can deadlock on
            NCCL without ``NCCL_LAUNCH_ORDER_IMPLICIT=1``.

    Example::

        plan = Plan.single("hierarchical")
        model = DistributedDataParallel(model, **plan.ddp_options())
        register(model, plan)
    """
    ddp = require_ddp(model)
    state = PlanState(plan, topology)
    state._adopt([ddp])  # all ranks are here now; not so in the first backward
    fp16 = any(p.requires_grad and p.dtype == torch.float16 for p in ddp.parameters())
    if plan.is_plain and not fp16 and nccl_class(ddp.process_group) == "ProcessGroupNCCL":
        return
    ddp.register_comm_hook(state, plan_hook)
