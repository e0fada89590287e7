"""Groups that export by copies between ranks, in parts so small that little tensors take several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from group_world import TIMEOUT, Way, World

from pitstop.plan import Export
from pitstop_runtime.groups import PeerCopies, Wiring, copies, registry, release

RANKS = 3
PART_BYTES = 64
SOON_S = TIMEOUT.total_seconds() / 2
"""Well below the time limit of collectives: nobody waited for that."""


def world_of_copies() -> tuple[World, PeerCopies]:
    """Groups of which one exports by copies, in small parts; the training communicators are released."""
    copies.HALF_BYTES = PART_BYTES
    world = World(Way.FRESH)
    registry.rewire(Wiring(export=Export.COPIES))
    world.agree()
    release(registry.communicators())
    (export,) = registry.exports()
    assert isinstance(export, PeerCopies)
    assert export is world.whole.export
    return world, export


@contextmanager
def opened() -> Iterator[tuple[World, PeerCopies]]:
    """The same, open and carrying the group's collectives, as within a weight sync."""
    world, export = world_of_copies()
    export.open()
    registry.route_to_export(True)
    yield world, export
    registry.route_to_export(False)
    export.close()


def numbers(count: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> torch.Tensor:
    """Different on each rank, and exact in every type."""
    return ((torch.arange(count) * 3 + dist.get_rank() * 7 + shift) % 50).to(dtype)


def raised(action: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """What an action raises."""
    try:
        action(*arguments, **options)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]
