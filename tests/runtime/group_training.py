"""Training under FSDP2 and DDP: losses and parameters, with a turn between the steps as a switch would make."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from group_world import Way, World, begin_world
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

_STEPS = 3


def train(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> list[Any]:
    """Loss and a hash of the full parameters after each step."""
    found = []
    generator = torch.Generator().manual_seed(100 + world.rank)
    for _ in range(_STEPS):
        world.turn()
        loss = model(torch.rand(5, 16, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append([float(loss.detach()), digest(model)])
    return found


def digest(model: nn.Module) -> str:
    """A hash of all parameters."""
    total = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        total.update(whole.detach().numpy().tobytes())
    return total.hexdigest()


def layers() -> nn.Sequential:
    """The same model on every rank."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 8))


def sharded(mesh: Callable[[World], DeviceMesh], world: World) -> list[Any]:
    """FSDP2 over a mesh: of two dimensions, the first replicates."""
    model = layers()
    over = mesh(world)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)
    return train(model, torch.optim.AdamW(model.parameters(), lr=0.01), world)


def replicated(world: World, **options: Any) -> list[Any]:
    """DDP over one of the groups."""
    model = DistributedDataParallel(layers(), process_group=world.whole, bucket_cap_mb=0.001, **options)
    found = train(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
    with model.no_sync():
        model(torch.ones(2, 16)).sum().backward()
    world.turn()
    model(torch.ones(2, 16)).sum().backward()
    return [*found, [parameter.grad.tolist() for parameter in list(model.parameters())[-1:]]]


def case_training(way: str, store: str) -> dict[str, Any]:
    """Every kind of data parallelism that torch has."""
    if way == Way.PLAIN:
        begin_world("gloo", store)
    world = World(Way(way))
    return {
        "fsdp2": sharded(lambda world: init_device_mesh("cpu", (world.size,)), world),
        "fsdp2 over a group of the trainer's": sharded(
            lambda world: DeviceMesh.from_group(world.whole, "cpu"), world
        ),
        "hsdp": sharded(
            lambda world: init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("r", "s")), world
        ),
        "ddp": replicated(world),
        "ddp, static graph": replicated(world, static_graph=True, gradient_as_bucket_view=True),
    }
