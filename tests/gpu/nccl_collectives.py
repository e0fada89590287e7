"""What comes out of collectives on GPUs, in numbers: equal for a plain and a managed group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

Turn = Callable[[], None]
COUNT = 96


def device() -> torch.device:
    """Where this rank's tensors are: on its GPU, or, to try the checks out, on the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def values(group: ProcessGroup, rows: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers that differ on each rank and in each row."""
    numbers = torch.arange(COUNT, device=device()) % 13 + 3 * (group.rank() + 1)
    stacked = torch.stack([numbers + 5 * row for row in range(rows)]) if rows else numbers
    return stacked.to(dtype)


def zeros(*shape: int) -> torch.Tensor:
    """To be filled."""
    return torch.zeros(*shape, device=device())


def reductions(group: ProcessGroup) -> list[Any]:
    found = []
    for operator in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            tensor = values(group, dtype=dtype)
            dist.all_reduce(tensor, operator, group=group)
            found.append(tensor.tolist())
    later = [values(group) * scale for scale in range(1, 4)]
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in later]:
        work.wait()
    target, scattered, part = values(group), zeros(COUNT), zeros(COUNT)
    dist.reduce(target, group=group, group_dst=1)
    dist.reduce_scatter(scattered, list(values(group, group.size())), group=group)
    dist.reduce_scatter_tensor(part, values(group, group.size()).flatten(), group=group)
    reduced = target.tolist() if group.rank() == 1 else None
    return [found, [each.tolist() for each in later], reduced, scattered.tolist(), part.tolist()]


def movements(group: ProcessGroup) -> list[Any]:
    size, here = group.size(), group.rank() == 1
    gathered, whole, sent = [zeros(COUNT) for _ in range(size)], zeros(size * COUNT), values(group)
    dist.all_gather(gathered, values(group), group=group)
    dist.all_gather_into_tensor(whole, values(group) + 1, group=group)
    dist.broadcast(sent, group=group, group_src=1)
    swapped, single = [zeros(COUNT) for _ in range(size)], zeros(size, COUNT)
    if device().type == "cuda":
        dist.all_to_all(swapped, list(values(group, size)), group=group)
    dist.all_to_all_single(single, values(group, size), group=group)
    collected = [zeros(COUNT) for _ in range(size)] if here else None
    dist.gather(values(group), collected, group=group, group_dst=1)
    dealt = zeros(COUNT)
    dist.scatter(dealt, list(values(group, size)) if here else None, group=group, group_src=1)
    lists = [gathered, swapped, collected or []]
    return [
        [t.tolist() for t in (whole, sent, single, dealt)],
        [[t.tolist() for t in each] for each in lists],
    ]


def messages(group: ProcessGroup) -> list[Any]:
    received = zeros(COUNT)
    if group.rank():
        dist.recv(received, group=group, group_src=group.rank() - 1)
    if group.rank() < group.size() - 1:
        dist.send(values(group) + received, group=group, group_dst=group.rank() + 1)
    return received.tolist()


def objects(group: ProcessGroup) -> list[Any]:
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, {"rank": group.rank(), "text": "x" * group.rank()}, group=group)
    shared = [group.rank()]
    dist.broadcast_object_list(shared, group=group, group_src=1)
    dist.barrier(group=group)
    return [gathered, shared]


def coalesced(group: ProcessGroup) -> list[Any]:
    manager = dist.distributed_c10d._coalescing_manager
    reduced = [values(group) * scale for scale in (1, 2)]
    with manager(group):
        for tensor in reduced:
            dist.all_reduce(tensor, group=group)
    gathered = [zeros(group.size() * COUNT) for _ in range(2)]
    with manager(group, async_ops=True) as block:
        for number, tensor in enumerate(gathered):
            dist.all_gather_into_tensor(tensor, values(group) + number, group=group)
    block.wait()
    if device().type == "cuda":  # gloo has no such blocks
        with manager(group, device()):
            for tensor in reduced:
                dist.all_reduce(tensor, group=group)
    return [[t.tolist() for t in each] for each in (reduced, gathered)]


def functional(group: ProcessGroup) -> list[Any]:
    rows = values(group, group.size())
    outcome = [
        funcol.all_reduce(values(group), "sum", group),
        funcol.all_gather_tensor(values(group), 0, group),
        funcol.reduce_scatter_tensor(rows, "sum", 0, group),
        funcol.all_to_all_single(rows, None, None, group),
        funcol.broadcast(values(group), 1, group),
    ]
    return [tensor.tolist() for tensor in outcome]


def distributed_tensors(group: ProcessGroup) -> list[Any]:
    mesh = DeviceMesh.from_group(group, device().type)
    whole = torch.arange(16.0 * group.size(), device=device()).view(4 * group.size(), 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    product = sharded @ distribute_tensor(torch.ones(4, 4, device=device()), mesh, [Replicate()])
    return [product.full_tensor().tolist(), float(sharded.sum().full_tensor())]


COLLECTIVES: dict[str, Callable[[ProcessGroup], list[Any]]] = {
    "reductions": reductions,
    "movements": movements,
    "messages": messages,
    "objects": objects,
    "coalesced": coalesced,
    "functional": functional,
    "distributed tensors": distributed_tensors,
}


def training(group: ProcessGroup, turn: Turn) -> list[Any]:
    """Losses and a weight of a model under FSDP2, with a turn between the steps as a switch would make."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8)).to(device())
    fully_shard(model, mesh=DeviceMesh.from_group(group, device().type))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in range(3):
        torch.manual_seed(100 * step + group.rank())
        loss = model(torch.rand(5, 16).to(device())).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
        turn()
    weight = next(iter(model.parameters()))
    assert isinstance(weight, DTensor)
    return [*found, weight.full_tensor().tolist()]
