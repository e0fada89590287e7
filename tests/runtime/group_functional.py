"""Functional collectives, device meshes and DTensor over managed groups: what comes out, in numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # imported at the first functional collective: before the ranks are forked, not in each
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from group_collectives import lists, values
from group_world import Way, World, begin_world
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def collectives(group: ProcessGroup) -> dict[str, Any]:
    """Each functional collective, by the group itself."""
    size = group.size()
    rows = values(group, size)
    outcome = {
        "all_reduce": funcol.all_reduce(values(group), "sum", group),
        "all_gather": funcol.all_gather_tensor(values(group), 0, group),
        "all_gather, second dimension": funcol.all_gather_tensor(rows, 1, group),
        "reduce_scatter": funcol.reduce_scatter_tensor(rows, "sum", 0, group),
        "broadcast": funcol.broadcast(values(group), size - 1, group),
        "all_to_all": funcol.all_to_all_single(rows, None, None, group),
        "permute": funcol.permute_tensor(values(group), [(n + 1) % size for n in range(size)], group),
    }
    several = {
        "all_reduce": funcol.all_reduce_coalesced([values(group), rows], "max", group),
        "all_gather": funcol.all_gather_into_tensor_coalesced([values(group), rows], group),
        "reduce_scatter": funcol.reduce_scatter_tensor_coalesced([rows, rows * 2], "sum", [0, 0], group),
    }
    return {name: tensor.tolist() for name, tensor in outcome.items()} | {
        f"{name}, coalesced": lists(tensors) for name, tensors in several.items()
    }


def differentiated(group: ProcessGroup) -> list[Any]:
    """Gradients through functional collectives."""
    found = []
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda tensor: funcol.all_gather_tensor_autograd(tensor, 0, group),
        lambda tensor: funcol.reduce_scatter_tensor_autograd(tensor, "sum", 0, group),
        lambda tensor: funcol.all_to_all_single_autograd(tensor, None, None, group),
    ]
    for step in steps:
        tensor = values(group, group.size()).requires_grad_()
        result = step(tensor)
        (result * result.detach()).sum().backward()
        assert tensor.grad is not None
        found.append([result.tolist(), tensor.grad.tolist()])
    return found


class Meshes:
    """Meshes of all kinds, made once."""

    def __init__(self, world: World) -> None:
        self.grid = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("dp", "tp"))
        self.line = init_device_mesh("cpu", (world.size,))
        self.flat = self.grid._flatten("both")
        self.borrowed = DeviceMesh.from_group(world.twin, "cpu")

    def groups(self) -> dict[str, ProcessGroup]:
        """Their groups, by names that tell them apart."""
        dp, tp = self.grid.get_all_groups()
        assert self.grid["tp"].get_group() is tp
        assert self.grid.get_group("dp") is dp
        return {
            "dp": dp,
            "tp": tp,
            "line": self.line.get_group(),
            "flat": self.flat.get_group(),
            "borrowed": self.borrowed.get_group(),
        }

    def sums(self) -> dict[str, Any]:
        """An all-reduce over each, by torch and by functional collectives."""
        found = {}
        for name, group in self.groups().items():
            tensor = values(group) + dist.get_rank()
            dist.all_reduce(tensor, group=group)
            found[name] = [tensor.tolist(), dist.get_process_group_ranks(group)]
        for name, mesh in {"dp": (self.grid, 0), "tp": self.grid["tp"], "line": self.line}.items():
            found[f"{name}, functional"] = funcol.all_reduce(torch.arange(4.0), "sum", mesh).tolist()
        return found


def distributed_tensors(meshes: Meshes, turn: Callable[[], None]) -> dict[str, Any]:
    """Redistribution and products of DTensors, with a turn before each use of communicators."""
    generator = torch.Generator().manual_seed(1)
    left, right = torch.rand(8, 12, generator=generator), torch.rand(12, 4, generator=generator)
    found = {}
    placed = distribute_tensor(left, meshes.line, [Shard(0)])
    for name, placements in {
        "replicate": [Replicate()],
        "other dimension": [Shard(1)],
        "back": [Shard(0)],
    }.items():
        turn()
        placed = placed.redistribute(placements=placements)
        found[name] = placed.to_local().tolist()
    turn()
    partial = DTensor.from_local(left, meshes.line, [Partial()])
    found["partial to shard"] = partial.redistribute(placements=[Shard(1)]).to_local().tolist()
    turn()
    product = distribute_tensor(left, meshes.grid, [Shard(0), Shard(1)]) @ distribute_tensor(
        right, meshes.grid, [Replicate(), Shard(0)]
    )
    turn()
    found["product"] = product.full_tensor().tolist()
    return found


def case_functional(way: str, store: str) -> dict[str, Any]:
    """All of these, before and after a turn."""
    if way == Way.PLAIN:
        begin_world("gloo", store)
    world = World(Way(way))
    found: dict[str, Any] = {}
    meshes = Meshes(world)
    for time in ("first", "second"):
        found[f"collectives, {time} time"] = [collectives(group) for group in world.mine()]
        found[f"gradients, {time} time"] = [differentiated(group) for group in world.mine()]
        found[f"meshes, {time} time"] = meshes.sums()
        world.turn()
    return found | distributed_tensors(meshes, world.turn)
