"""The processes of a run: devices, process group, and agreement between ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import missing_ranks_named, rendezvous
from .errors import AgreedError, RecipeError, user_errors
from .schema.recipe import Recipe

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """This process among those that torchrun started; alone without torchrun.

    Attributes:
        rank: among all processes.
        world_size: number of all processes.
        local_world_size: processes on this machine.
        device: this process's.
    """

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def all_reduce_max(self, *numbers: float) -> list[float]:
        """The largest of each number over all ranks."""
        values = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return list(values.tolist())

    def from_main(self, text: str) -> str:
        """The leader's ``text``, on every rank."""
        box = [text]
        if self.world_size > 1:
            dist.broadcast_object_list(box, device=self.device)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """The ``value`` of every rank, on every rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Run a body without collectives; an error of any rank is raised on all of them.

        Raises:
            AgreedError: the message of the first rank that failed. A rank whose error is not one
                of the user's raises that error itself.
        """
        message, unexpected = "", None
        try:
            yield
        except user_errors() as error:
            message = str(error)
        except Exception as error:  # the others must not wait for this rank
            message, unexpected = f"{type(error).__name__}: {error}", error
        messages = self.gather(message)
        if unexpected:
            raise unexpected
        failed = [rank for rank, text in enumerate(messages) if text]
        if failed:
            where = "" if len(failed) == self.world_size else f"rank {failed[0]}: "
            raise AgreedError(where + messages[failed[0]])

    def check_alike(self, facts: dict[str, str]) -> None:
        """See that ``facts``, by what they are about, are the same on all ranks.

        Raises:
            AgreedError: names the first that is not, and what two ranks have.
        """
        if self.world_size == 1:
            return
        everyone = self.gather(facts)
        for rank, others in enumerate(everyone):
            for name, value in everyone[0].items():
                if others[name] != value:
                    raise AgreedError(
                        f"ranks do not run the same: {name} is {value} on rank 0, "
                        f"{others[name]} on rank {rank}"
                    )


def _threads_are_chosen() -> bool:
    """Whether somebody said how many threads a process computes with."""
    number = os.environ.get("OMP_NUM_THREADS")
    # torchrun sets 1 where nothing was set, however many cores there are for each process.
    return number is not None and not (number == "1" and "RANK" in os.environ)


@contextmanager
def joined(recipe: Recipe) -> Iterator[Job]:
    """Join the job that torchrun started, if it did, and leave it at the end.

    Raises:
        RecipeError: the recipe asks for a GPU that this process has not got.
        CollectiveError: a rank ended; the message names it.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = device_of(recipe, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif not _threads_are_chosen():
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
    if "RANK" not in os.environ:
        yield Job(0, 1, 1, device)
        return
    timeout = timedelta(seconds=recipe.comm.timeout_seconds)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=rendezvous(timeout),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    with group_destroyed(), missing_ranks_named():
        yield Job(dist.get_rank(), dist.get_world_size(), local_world_size, device)


@contextmanager
def group_destroyed() -> Iterator[None]:
    """Destroy the process group after a body, unless this rank failed alone, on NCCL.

    There it would wait for collectives that the other ranks never finish (pytorch/pytorch, pull
    request 141510), and the error be told when they time out. The end of the process aborts them.
    """
    try:
        yield
    except (AgreedError, SystemExit):  # of all ranks
        dist.destroy_process_group()
        raise
    except BaseException:
        if dist.get_backend() != "nccl":
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def device_of(recipe: Recipe, local_rank: int) -> torch.device:
    """The device of a process.

    Raises:
        RecipeError: the recipe asks for a GPU, and there is none for this process.
    """
    gpus = torch.cuda.device_count()
    if recipe.device == "cpu" or (recipe.device == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == 0:
        raise RecipeError(
            "device: cuda, but this machine has no CUDA GPU; device=cpu trains on the processor"
        )
    if local_rank >= gpus:
        raise RecipeError(
            f"local rank {local_rank} has no GPU: this machine has {gpus}; "
            f"start at most --nproc-per-node {gpus}, or device=cpu"
        )
    return torch.device("cuda", local_rank)
