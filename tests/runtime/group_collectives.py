"""Every collective of ``torch.distributed``: what comes out of it, in numbers.

Each check takes a group and gives something that can be written as JSON, equal for a plain and a managed group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

Check = Callable[[ProcessGroup], Any]
CHECKS: dict[str, Check] = {}
_OPERATORS = {"sum": ReduceOp.SUM, "product": ReduceOp.PRODUCT, "min": ReduceOp.MIN, "max": ReduceOp.MAX}


def check(function: Check) -> Check:
    """Note a check by its name."""
    CHECKS[function.__name__] = function
    return function


def values(group: ProcessGroup, rows: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that differ on each rank and, with ``rows``, in each row."""
    numbers = torch.arange(12, dtype=dtype) + 10 * (group.rank() + 1)
    return torch.stack([numbers + 1000 * row for row in range(rows)]) if rows else numbers


def lists(tensors: list[torch.Tensor]) -> list[Any]:
    """Their numbers."""
    return [tensor.tolist() for tensor in tensors]


def finish(work: dist.Work) -> bool:
    """Wait in the ways that trainers wait."""
    work.wait()
    return work.is_completed()


def carried(collective: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a collective returns; False if this release's gloo does not have it."""
    try:
        return collective(*arguments, **options)
    except RuntimeError as error:
        if "Backend gloo does not support" not in str(error):
            raise
        return False


@check
def names_and_ranks(group: ProcessGroup) -> Any:
    members = dist.get_process_group_ranks(group)
    return {
        "description": group.group_desc,
        "ranks": members,
        "rank": [dist.get_rank(group), group.rank()],
        "size": [dist.get_world_size(group), group.size()],
        "group_ranks": [dist.get_group_rank(group, member) for member in members],
        "global_ranks": [dist.get_global_rank(group, number) for number in range(len(members))],
        "resolved": dist.distributed_c10d._resolve_process_group(group.group_name) is group,
    }


@check
def all_reduce(group: ProcessGroup) -> Any:
    found = {}
    for name, operator in _OPERATORS.items():
        for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
            tensor = values(group, dtype=dtype)
            dist.all_reduce(tensor, operator, group=group)
            found[f"{name} {dtype}"] = tensor.tolist()
    return found


@check
def all_reduce_async(group: ProcessGroup) -> Any:
    tensors = [values(group) * scale for scale in range(1, 6)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    future = works[0].get_future()
    done = [finish(work) for work in works]
    return [lists(tensors), done, lists(future.wait())]


@check
def reduce(group: ProcessGroup) -> Any:
    found = []
    for target in range(group.size()):
        tensor = values(group)
        dist.reduce(tensor, group=group, group_dst=target)
        # Elsewhere, the tensor holds what was under way.
        found.append(tensor.tolist() if group.rank() == target else None)
    tensor = values(group)
    work = dist.reduce(tensor, dist.get_global_rank(group, 0), group=group, async_op=True)
    return [found, finish(work), tensor.tolist() if group.rank() == 0 else None]


@check
def broadcast(group: ProcessGroup) -> Any:
    found = []
    for source in range(group.size()):
        by_member, by_rank = values(group), values(group)
        dist.broadcast(by_member, group=group, group_src=source)
        work = dist.broadcast(by_rank, dist.get_global_rank(group, source), group=group, async_op=True)
        found.append([finish(work), *lists([by_member, by_rank])])
    return found


@check
def all_gather(group: ProcessGroup) -> Any:
    at_once = [torch.zeros(12) for _ in range(group.size())]
    later = [torch.zeros(12) for _ in range(group.size())]
    dist.all_gather(at_once, values(group), group=group)
    work = dist.all_gather(later, values(group) + 1, group=group, async_op=True)
    return [lists(at_once), finish(work), lists(later)]


@check
def all_gather_into_tensor(group: ProcessGroup) -> Any:
    at_once, later = torch.zeros(12 * group.size()), torch.zeros(12 * group.size())
    dist.all_gather_into_tensor(at_once, values(group), group=group)
    work = dist.all_gather_into_tensor(later, values(group) + 1, group=group, async_op=True)
    return [at_once.tolist(), finish(work), later.tolist()]


@check
def reduce_scatter(group: ProcessGroup) -> Any:
    tensor, later = torch.zeros(12), torch.zeros(12)
    dist.reduce_scatter(tensor, list(values(group, group.size())), group=group)
    work = dist.reduce_scatter(
        later, list(values(group, group.size())), ReduceOp.MAX, group=group, async_op=True
    )
    return [tensor.tolist(), finish(work), later.tolist()]


@check
def reduce_scatter_tensor(group: ProcessGroup) -> Any:
    tensor, later = torch.zeros(12), torch.zeros(12)
    dist.reduce_scatter_tensor(tensor, values(group, group.size()).flatten(), group=group)
    work = dist.reduce_scatter_tensor(
        later, values(group, group.size()).flatten() + 1, group=group, async_op=True
    )
    return [tensor.tolist(), finish(work), later.tolist()]


@check
def all_to_all(group: ProcessGroup) -> Any:
    found = []
    for async_op in (False, True):
        received = [torch.zeros(12) for _ in range(group.size())]
        sent = list(values(group, group.size()))
        work = carried(dist.all_to_all, received, sent, group=group, async_op=async_op)
        found.append([finish(work) if work else work, lists(received)])
    return found


@check
def all_to_all_single(group: ProcessGroup) -> Any:
    size, rank = group.size(), group.rank()
    even = torch.zeros(size, 12)
    dist.all_to_all_single(even, values(group, size), group=group)
    # Each member sends one row more to the next: rank + 1 rows to each.
    sent = values(group, size * (rank + 1))
    counts = [member + 1 for member in range(size)]
    uneven = torch.zeros(sum(counts), 12)
    work = dist.all_to_all_single(uneven, sent, counts, [rank + 1] * size, group=group, async_op=True)
    return [even.tolist(), finish(work), uneven.tolist()]


@check
def gather_and_scatter(group: ProcessGroup) -> Any:
    found = []
    for root in range(group.size()):
        here = group.rank() == root
        gathered = [torch.zeros(12) for _ in range(group.size())] if here else None
        dist.gather(values(group), gathered, group=group, group_dst=root)
        scattered = torch.zeros(12)
        source = list(values(group, group.size())) if here else None
        work = dist.scatter(scattered, source, dist.get_global_rank(group, root), group=group, async_op=True)
        found.append([lists(gathered or []), finish(work), scattered.tolist()])
    return found


@check
def gather_single(group: ProcessGroup) -> Any:
    if not hasattr(dist, "gather_single"):
        return "from torch 2.14 on"
    gathered = torch.zeros(12 * group.size()) if group.rank() == 0 else None
    if carried(dist.gather_single, values(group), gathered, group=group, group_dst=0) is False:
        return "not over gloo"
    return None if gathered is None else gathered.tolist()


@check
def send_and_receive(group: ProcessGroup) -> Any:
    size, rank = group.size(), group.rank()
    received = torch.zeros(12)
    # A chain from the first to the last, by members and by ranks.
    if rank:
        dist.recv(received, group=group, group_src=rank - 1)
    if rank < size - 1:
        dist.send(values(group) + received, dist.get_global_rank(group, rank + 1), group=group)
    anyone = []
    if rank == 0:
        tensor = torch.zeros(12)
        for _ in range(size - 1):
            sender = dist.recv(tensor, group=group)
            anyone.append([sender, tensor.tolist()])
    else:
        dist.send(values(group), group=group, group_dst=0, tag=0)
    return [received.tolist(), sorted(anyone)]


@check
def isend_and_irecv(group: ProcessGroup) -> Any:
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    received = [torch.zeros(12) for _ in range(3)]
    works = [dist.isend(values(group) * tag, group=group, group_dst=after, tag=tag) for tag in range(3)]
    # In another order than they were sent: the tag says which is which.
    works += [
        dist.irecv(received[tag], dist.get_global_rank(group, before), group=group, tag=tag)
        for tag in (2, 0, 1)
    ]
    return [[finish(work) for work in works], lists(received)]


@check
def batch_isend_irecv(group: ProcessGroup) -> Any:
    found = []
    for step in range(1, group.size()):
        after, before = (group.rank() + step) % group.size(), (group.rank() - step) % group.size()
        received = torch.zeros(12)
        operations = [
            dist.P2POp(dist.isend, values(group), group=group, group_peer=after),
            dist.P2POp(dist.irecv, received, dist.get_global_rank(group, before), group=group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        found.append(received.tolist())
    return found


@check
def barriers(group: ProcessGroup) -> Any:
    dist.barrier(group=group)
    return finish(dist.barrier(group=group, async_op=True))


@check
def objects(group: ProcessGroup) -> Any:
    size, rank = group.size(), group.rank()
    mine = {"rank": rank, "text": "x" * (rank + 1)}
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, mine, group=group)
    shared: list[Any] = [mine, rank]
    dist.broadcast_object_list(shared, group=group, group_src=size - 1)
    collected: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(mine, collected, group=group, group_dst=0)
    scattered: list[Any] = [None]
    source = [{"for": member} for member in range(size)] if rank == 0 else None
    dist.scatter_object_list(scattered, source, group=group, group_src=0)
    passed: list[Any] = [None, None]
    if rank == 0:
        dist.send_object_list([mine, "end"], group=group, group_dst=1)
    elif rank == 1:
        dist.recv_object_list(passed, group=group, group_src=0)
    return [gathered, shared, collected, scattered, passed]


@check
def coalesced(group: ProcessGroup) -> Any:
    manager = dist.distributed_c10d._coalescing_manager
    size = group.size()
    reduced, later = [values(group) * scale for scale in (1, 2)], [values(group) * 3, values(group) * 4]
    with manager(group):
        for tensor in reduced:
            dist.all_reduce(tensor, group=group)
    with manager(group, async_ops=True) as collected:
        for tensor in later:
            dist.all_reduce(tensor, group=group)
    collected.wait()
    gathered, scattered = [torch.zeros(12 * size) for _ in range(2)], [torch.zeros(12) for _ in range(2)]
    with manager(group):
        for number, tensor in enumerate(gathered):
            dist.all_gather_into_tensor(tensor, values(group) + number, group=group)
    with manager(group):
        for number, tensor in enumerate(scattered):
            dist.reduce_scatter_tensor(tensor, values(group, size).flatten() + number, group=group)
    return [lists(part) for part in (reduced, later, gathered, scattered)]


@check
def coalesced_by_name(group: ProcessGroup) -> Any:
    size = group.size()
    tensors = [values(group), values(group) * 2]
    group.allreduce_coalesced(tensors).wait()
    rows = [[torch.zeros(12), torch.zeros(12)] for _ in range(size)]
    group.allgather_coalesced(rows, [values(group), values(group) * 2]).wait()
    gathered, scattered = torch.zeros(12 * size), torch.zeros(12)
    group.allgather_into_tensor_coalesced([gathered], [values(group)]).wait()
    group.reduce_scatter_tensor_coalesced([scattered], [values(group, size).flatten()]).wait()
    return [lists(tensors), [lists(row) for row in rows], *lists([gathered, scattered])]


@check
def methods_of_the_group(group: ProcessGroup) -> Any:
    """What libraries call on a group itself."""
    summed, sent = values(group), values(group)
    group.allreduce(summed).wait()
    group.broadcast(sent, root=1).wait()
    group.barrier().wait()
    backend = group._get_backend(torch.device("cpu"))
    return [summed.tolist(), sent.tolist(), backend.size(), group._has_hooks(), backend.name()]
