"""The groups that checks over NCCL are made on, and how a check looks at them."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nccl_collectives import device
from torch.distributed import ProcessGroup

from pitstop_runtime.groups import BACKEND_NAME, Library, ManagedGroup, registry, release

TIMEOUT = timedelta(seconds=90)
MIB = 2**20
AT_ONCE_S = 1.0

# NCCL says in its log which communicators it makes; it reads this once.
_LOG = Path(tempfile.mkdtemp(prefix="pitstop-nccl-")) / "nccl.log"
os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": str(_LOG)}


Check = Callable[["World"], Any]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Note a check by its name: it raises if anything is wrong, and returns what may be of interest."""
    CHECKS[function.__name__] = function
    return function


class NotHereError(Exception):
    """The check cannot be made with what is here; the text says why."""


class World:
    """Groups over all ranks: two of torch's own, for control and to compare with, and managed ones."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.library = Library.NCCL if torch.cuda.is_available() else Library.GLOO
        self.control = dist.new_group(backend="gloo", timeout=3 * TIMEOUT)
        self.plain = dist.new_group(backend=self.library.value, timeout=TIMEOUT)
        self.whole = self.new("TENSOR_MODEL_PARALLEL_GROUP")
        self.twin = self.new("MODEL_PARALLEL_GROUP")

    def new(self, description: str, timeout: timedelta = TIMEOUT, **options: Any) -> ManagedGroup:
        """A managed group of all ranks."""
        group = dist.new_group(backend=BACKEND_NAME, timeout=timeout, group_desc=description, **options)
        assert isinstance(group, ManagedGroup)
        return group

    def agree(self) -> None:
        """Wait for all ranks, the GPU being idle."""
        if self.library is Library.NCCL:
            torch.cuda.synchronize()
        dist.barrier(group=self.control)

    def rebuild(self) -> None:
        """Release all communicators and build them again, as a switch does."""
        self.agree()
        release(registry.communicators())
        self.agree()
        for each in registry.communicators():
            each.build()
        self.agree()

    def need_nccl(self) -> None:
        if self.library is not Library.NCCL:
            raise NotHereError("needs NCCL")


def total(group: ProcessGroup) -> float:
    """A sum over the group: of ranks plus one."""
    tensor = torch.full((1000,), group.rank() + 1.0, device=device())
    dist.all_reduce(tensor, group=group)
    return float(tensor[999])


def expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise AssertionError(f"{what}: {str(found)[:500]} instead of {str(expected)[:500]}")


def refusal(action: Callable[[], Any]) -> tuple[str, str, bool]:
    """What an action raises, and whether at once."""
    begun = time.monotonic()
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun < AT_ONCE_S
    return "nothing", "", True


def used_bytes() -> int:
    """Of the whole GPU."""
    free, whole = torch.cuda.mem_get_info()
    return whole - free


def communicators_made() -> int:
    """How many this process has made since it began, by NCCL's log."""
    return _LOG.read_text().count("Init COMPLETE") if _LOG.exists() else 0


def whole_sum() -> float:
    """What ``total`` gives over all ranks."""
    return sum(range(1, dist.get_world_size() + 1)) * 1.0


def options_of(communicator: Any) -> Any:
    """Options of the backend below."""
    return communicator.backend.options


def exchange(group: ProcessGroup, count: int, batch: Callable[..., Any]) -> list[Any]:
    """Two messages to the next rank, two from the one before, all that is sent first: as pipeline stages do."""
    size, rank = group.size(), group.rank()
    sent = [torch.full((count,), 10.0 * rank + number, device=device()) for number in range(2)]
    received = [torch.zeros(count, device=device()) for _ in range(2)]
    operations = [
        dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size) for tensor in sent
    ]
    operations += [
        dist.P2POp(dist.irecv, tensor, group=group, group_peer=(rank - 1) % size) for tensor in received
    ]
    works = batch(operations)
    for work in works:
        work.wait()
    return [len(works), [[float(tensor.min()), float(tensor.max())] for tensor in received]]
