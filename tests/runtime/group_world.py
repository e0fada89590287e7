"""The groups that checks run over, and what happens to their communicators meanwhile.

A check gives the same answers whichever ``Way`` the groups are made and treated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from enum import StrEnum

import torch.distributed as dist
from torch.distributed import ProcessGroup

from pitstop_runtime.groups import BACKEND_NAME, CommunicatorState, Wiring, registry, release

TIMEOUT = timedelta(seconds=20)


class Way(StrEnum):
    """Who carries the collectives, and what is done to communicators at every ``turn``."""

    PLAIN = "plain"  # torch's own gloo groups
    FRESH = "fresh"  # managed, left alone
    REBUILT = "rebuilt"  # managed, all released and built again
    SHARED = "shared"  # managed, equal rank sets share one communicator; released and built again too
    REWIRED = "rewired"  # managed, sharing switched on and off


class World:
    """One rank's groups, in a world that exists.

    Attributes:
        whole: all ranks, described as Megatron's tensor-parallel group.
        twin: all ranks too; rides on the communicator of ``whole`` where communicators are shared.
        part: all ranks but the first, so that ranks within it are other numbers; None on the first.
    """

    def __init__(self, way: Way) -> None:
        self.way, self.rank, self.size = way, dist.get_rank(), dist.get_world_size()
        everyone = range(self.size)
        self._control = dist.new_group(timeout=TIMEOUT, backend="gloo")
        self.whole = self._new(everyone, "TENSOR_MODEL_PARALLEL_GROUP")
        self.twin = self._new(everyone, "MODEL_PARALLEL_GROUP")
        part = self._new(everyone[1:], "DATA_PARALLEL_GROUP")
        self.part = part if self.rank else None
        self._turns = itertools.count()
        self.agree()
        self.turn()

    def mine(self) -> list[ProcessGroup]:
        """Groups that this rank is in, of different members."""
        return [group for group in (self.whole, self.part) if group is not None]

    def turn(self) -> None:
        """Do to the communicators what a switch does, on all ranks at the same point."""
        match self.way:
            case Way.REBUILT:
                self.rebuild()
            case Way.SHARED:
                registry.rewire(Wiring(share=True, cold_max_ctas=1))
                self.agree()
                self.rebuild()
            case Way.REWIRED:
                registry.rewire(Wiring(share=next(self._turns) % 2 == 0, cold_max_ctas=1))
                assert all(each.state is CommunicatorState.LIVE for each in registry.communicators())
                self.agree()
            case _:
                pass

    def rebuild(self) -> None:
        """Release all communicators of training and build them again."""
        communicators = registry.communicators()
        release(communicators)
        assert all(each.state is CommunicatorState.RELEASED and not each.used for each in communicators)
        for each in communicators:
            each.build()
        self.agree()

    def agree(self) -> None:
        """Wait for all ranks, as at the end of each phase of a switch.

        A rank that released at once what it has just built would close the door on one that is still building.
        """
        dist.barrier(group=self._control)

    def _new(self, ranks: Sequence[int], description: str) -> ProcessGroup:
        backend = "gloo" if self.way is Way.PLAIN else BACKEND_NAME
        return dist.new_group(list(ranks), TIMEOUT, backend, group_desc=description)


def begin_world(backend: str, store: str) -> None:
    """Leave the world that the rank server made, and join one with this backend."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # whoever leaves closes the door on one that is still joining
    dist.destroy_process_group()
    dist.init_process_group(
        backend, timeout=TIMEOUT, rank=rank, world_size=size, init_method=f"file://{store}"
    )
