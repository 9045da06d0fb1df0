"""The processes of a run: their devices, their process group, and checks across ranks."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import (
    CollectiveError,
    missing_ranks_named,
    nccl_class,
    order_launches,
    rendezvous,
    with_missing_ranks,
)
from .errors import AgreedError, LostRankError, RecipeError, user_errors
from .launcher import ending_with_launcher
from .schema.recipe import Recipe

T = TypeVar("T")

#: How long ranks wait at the end of a run for rank 0, which may have files and trackers to close.
_SECONDS_TO_END = 60
_POLL_SECONDS = 0.05
_runs = itertools.count()


@dataclass(frozen=True)
class Job:
    """This process among those that torchrun started, or a single process without torchrun.

    The methods that communicate are collectives: every rank must call them, in the same order.

    Attributes:
        rank: Global rank of this process.
        world_size: Number of processes.
        local_world_size: Number of processes on this machine.
        device: Device of this process.
    """

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes files for all ranks."""
        return self.rank == 0

    @property
    def back_end(self) -> str:
        """What carries messages, as ``nccl (ProcessGroupNCCL2, NCCL 2.30.7)``; empty if nothing."""
        if not dist.is_initialized():
            return ""
        version = ".".join(map(str, torch.cuda.nccl.version())) if nccl_class() else ""
        return dist.get_backend() + (version and f" ({nccl_class()}, NCCL {version})")

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def all_reduce_max(self, *numbers: float) -> list[float]:
        """Return the maximum over all ranks of each number."""
        values = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return list(values.tolist())

    def all_gather(self, *numbers: float) -> list[list[float]]:
        """Return the numbers of each rank, in order of rank, on every rank."""
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        everyone = [own] * self.world_size
        if self.world_size > 1:
            everyone = [torch.empty_like(own) for _ in range(self.world_size)]
            dist.all_gather(everyone, own)
        return [list(values) for values in torch.stack(everyone).tolist()]

    def from_main(self, text: str) -> str:
        """Return rank 0's ``text`` on every rank."""
        box = [text]
        if self.world_size > 1:
            dist.broadcast_object_list(box, device=self.device)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return the ``value`` of each rank, in order of rank, on every rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    @contextmanager
    def raise_on_all_ranks(self, kind: type[AgreedError] = AgreedError) -> Iterator[None]:
        """Context manager that raises an error of its body on all ranks; itself a collective."""
        message, unexpected = "", None
        try:
            yield
        except user_errors() as error:
            message = str(error)
        except Exception as error:  # or the other ranks would wait for this one
            message, unexpected = f"{type(error).__name__}: {error}", error
        messages = self.gather(message)
        if unexpected:
            raise unexpected
        failed = [rank for rank, text in enumerate(messages) if text]
        if failed:
            where = "" if len(failed) == self.world_size else f"rank {failed[0]}: "
            raise kind(where + messages[failed[0]])

    @contextmanager
    def main_ends_first(self) -> Iterator[None]:
        """Context manager of a run: rank 0 leaves it first, as torchrun ends all with one."""
        key = f"largebatch/main-has-ended/{next(_runs)}"
        try:
            yield
        except (AgreedError, SystemExit):
            self._wait_for_main(key)
            raise
        self._wait_for_main(key)

    def _wait_for_main(self, key: str) -> None:
        if self.world_size == 1:
            return
        end = time.monotonic() + _SECONDS_TO_END
        store = dist.distributed_c10d._get_default_store()
        with suppress(RuntimeError):  # the store has ended
            if self.is_main:
                store.set(key, "")
            while not store.check([key]) and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)

    def check_alike(self, facts: dict[str, str]) -> None:
        """Check that ``facts``, values by name, are the same on all ranks."""
        if self.world_size == 1:
            return
        everyone = self.gather(facts)
        for rank, others in enumerate(everyone):
            for name, value in everyone[0].items():
                if others[name] != value:
                    raise AgreedError(
                        f"the ranks do not run the same training: {name} is {value} on rank 0, "
                        f"{others[name]} on rank {rank}"
                    )


def _user_chose_threads() -> bool:
    """Whether the user chose the number of threads per process, by OMP_NUM_THREADS."""
    number = os.environ.get("OMP_NUM_THREADS")
    # torchrun sets it to 1 if it is unset, whatever the number of cores for each process.
    return number is not None and not (number == "1" and "RANK" in os.environ)


def _several_communicators(recipe: Recipe, local_world_size: int) -> bool:
    """Whether a step may communicate outside of the default group, decided before ranks connect."""
    comm = recipe.comm
    if recipe.batch_norm.ranks is not None or comm.plan is not None:
        return True
    if comm.algorithm == "auto" and comm.ranks_per_node is None:
        return int(os.environ["WORLD_SIZE"]) > local_world_size
    return comm.algorithm not in (None, "ring")


@contextmanager
def joined(recipe: Recipe) -> Iterator[Job]:
    """Context manager that joins the job that torchrun started, or makes a job of one process."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = device_of(recipe, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif not _user_chose_threads():
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
    if "RANK" not in os.environ:
        yield Job(0, 1, 1, device)
        return
    if device.type == "cuda" and _several_communicators(recipe, local_world_size):
        order_launches()
    timeout = timedelta(seconds=recipe.comm.timeout_seconds)
    with ending_with_launcher():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=rendezvous(timeout),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    agreed: AgreedError | None = None
    with group_destroyed(), missing_ranks_named(), lost_ranks_named():
        try:
            yield Job(dist.get_rank(), dist.get_world_size(), local_world_size, device)
        except AgreedError as error:  # the ranks leave in good order: none is missing
            agreed = error
    if agreed:
        raise agreed


@contextmanager
def lost_ranks_named(resumes: Callable[[], str] = str) -> Iterator[None]:
    """Context manager that raises the error of a collective as one line, if ranks are missing."""
    lost: LostRankError | None = None
    try:
        yield
    except RuntimeError as error:
        # Others, such as a lack of memory, are of this rank itself, whoever else has ended.
        if type(error) not in (RuntimeError, CollectiveError) and not isinstance(
            error, dist.DistError
        ):
            raise
        complete = with_missing_ranks(error)
        if not isinstance(complete, CollectiveError) or not complete.missing:
            raise
        rank, here = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
        is_first = {*range(rank - here, rank)} <= {*complete.ranks}
        lost = LostRankError(complete.missing, is_first, resumes())
    if lost:
        raise lost


@contextmanager
def group_destroyed() -> Iterator[None]:
    """Context manager that destroys the process group, unless this rank failed alone on NCCL.

    There it would wait for collectives that others never finish (pytorch/pytorch, pull request
    141510); the end of the process aborts them.
    """
    try:
        yield
    except (AgreedError, SystemExit):  # raised on all ranks
        dist.destroy_process_group()
        raise
    except BaseException:
        if not nccl_class():
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def device_of(recipe: Recipe, local_rank: int) -> torch.device:
    """Return the device of the process with this local rank."""
    gpus = torch.cuda.device_count()
    if recipe.device == "cpu" or (recipe.device == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == 0:
        raise RecipeError(
            "device: cuda, but this machine has no CUDA GPU; valid: device=cpu, to train on the CPU"
        )
    if local_rank >= gpus:
        raise RecipeError(
            f"device: local rank {local_rank} has no GPU, as this machine has {gpus}; "
            f"valid: at most --nproc-per-node {gpus}, or device=cpu"
        )
    return torch.device("cuda", local_rank)
