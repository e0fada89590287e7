"""All managed groups of this process, and which of them share a communicator."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from pitstop.inventory.caps import cap_of
from pitstop.inventory.lanes import Lane, is_bulk, lane_of, shared_parts
from pitstop.plan import Export, Plan
from pitstop_runtime.background import on_current_device
from pitstop_runtime.groups import p2p
from pitstop_runtime.groups.communicator import (
    Communicator,
    CommunicatorState,
    Library,
    Rendezvous,
    build_group,
)
from pitstop_runtime.groups.copies import PeerCopies
from pitstop_runtime.groups.handle import BACKEND_NAME, ManagedGroup
from pitstop_runtime.groups.options import GroupOptions

# Groups whose kind moves weights out of the trainer; ``pitstop.inventory.use`` says which a layout needs.
EXPORT_KINDS = frozenset(
    {
        "TENSOR_MODEL_PARALLEL_GROUP",
        "PIPELINE_MODEL_PARALLEL_GROUP",
        "EXPERT_TENSOR_PARALLEL_GROUP",
        "EXPERT_MODEL_PARALLEL_GROUP",
    }
)


@dataclass(frozen=True, slots=True)
class Wiring:
    """How handles map to communicators: the part of a plan that training sees."""

    share: bool = False
    cold_max_ctas: int | None = None
    hot_max_ctas: int | None = None
    export: Export = Export.TRAINING
    export_max_ctas: int | None = None
    manage_world: bool = True

    @classmethod
    def of(cls, plan: Plan, manage_world: bool = True) -> Wiring:
        """The wiring that a plan asks for."""
        return cls(
            share=plan.share,
            cold_max_ctas=plan.cold_max_ctas,
            hot_max_ctas=plan.hot_max_ctas,
            export=plan.export,
            export_max_ctas=plan.export_max_ctas if plan.export is Export.COMMUNICATOR else None,
            manage_world=manage_world,
        )


class Registry:
    """Makes handles for torch and communicators for handles. One per process: ``groups.registry``."""

    def __init__(self) -> None:
        self.handles: list[ManagedGroup] = []
        self.wiring = Wiring()
        self.rendezvous = Rendezvous()
        self.export_kinds: frozenset[str] = EXPORT_KINDS
        self.devices: Mapping[int, str] = {}  # by global rank, once the ranks have compared them
        self._lock = threading.RLock()
        self._indices = itertools.count()

    # Made by torch.

    def create(self, torch_options: Any, pg_options: Any) -> ProcessGroup:
        """Make a group as torch asks for it: a handle, or torch's own group where there is but one rank."""
        ranks = tuple(torch_options.global_ranks_in_group) or tuple(range(torch_options.group_size))
        library = Library.NCCL if torch.cuda.is_available() else Library.GLOO
        options = GroupOptions(torch_options.timeout, pg_options)
        name, rank, store = torch_options.group_id, torch_options.group_rank, torch_options.store
        if len(ranks) == 1:
            # A group of one rank has no communicator to speak of: torch's own, never touched.
            return build_group(library, store, ranks, rank, options, None, name)
        with self._lock:
            p2p.install()
            own = Communicator(name, library, store, ranks, rank, options, None, self.rendezvous)
            handle = ManagedGroup(own, name, next(self._indices), store, options)
            self.handles.append(handle)
            handle.attach(own)
            own.build()
            return handle

    # What a switch acts on.

    def managed(self) -> list[ManagedGroup]:
        """Living handles in the order of creation, without the default group if the trainer keeps that."""
        known = _torch_groups()
        world = dist.group.WORLD
        self.handles = [handle for handle in self.handles if handle in known]
        return [handle for handle in self.handles if self.wiring.manage_world or handle is not world]

    def communicators(self) -> list[Communicator]:
        """Communicators of training, each once, in the order of creation of their first handles.

        Two ranks list those that both are members of in the same order.
        """
        return list(dict.fromkeys(handle.communicator for handle in self.managed()))

    def exports(self) -> list[Communicator]:
        """Export communicators, each once, in the same kind of order."""
        return list(dict.fromkeys(handle.export for handle in self.managed() if handle.export is not None))

    def route_to_export(self, active: bool) -> None:
        """While active, groups that export weights run over their export communicators if released."""
        for handle in self.managed():
            handle.route_to_export(active)

    # Wiring.

    def rewire(self, wiring: Wiring, cool_down: Callable[[], None] = lambda: None) -> bool:
        """Map handles to communicators anew; returns whether anything changed.

        Call it on all ranks at the same point, with nothing under way: communicators that do not fit the new
        wiring are destroyed, and what was live is live again afterwards (with NCCL, from its next collective).
        ``cool_down`` is called in between, for ports to become free.
        """
        with self._lock:
            self.wiring = wiring
            wanted = [(members, self._cap(members)) for members in self._partition()]
            changed = [(members, cap) for members, cap in wanted if not _fits(members, cap)]
            old = list(dict.fromkeys(h.communicator for members, _ in changed for h in members))
            live = any(c.state is CommunicatorState.LIVE for c in old)
            used = {h for c in old if c.used or c.restore_use for h in c.handles}
            release(old)
            if live:
                cool_down()
            for members, cap in changed:
                communicator = self._communicator(members[0], cap)
                communicator.restore_use = not used.isdisjoint(members)
                for handle in members:
                    handle.attach(communicator)
                if live:
                    communicator.build()
            return self._rewire_exports() or bool(changed)

    def _partition(self) -> list[list[ManagedGroup]]:
        """Handles in sets that each get one communicator, by the order of their first ones."""
        if not self.wiring.share:
            return [[handle] for handle in self.managed()]
        return shared_parts(
            self.managed(),
            lambda handle: handle.description,
            lambda handle: (handle.library, handle.ranks, handle.options.key),
        )

    def _cap(self, members: Sequence[ManagedGroup]) -> int | None:
        """Channel cap of a communicator: that of hot ones if one of its groups carries more than a few numbers."""
        return cap_of(
            self.wiring.cold_max_ctas,
            self.wiring.hot_max_ctas,
            bulk=any(is_bulk(handle.description) and not self._is_idle_world(handle) for handle in members),
            same_gpu=len({self.devices.get(rank) for rank in members[0].ranks} - {None}) == 1,
        )

    def _is_idle_world(self, handle: ManagedGroup) -> bool:
        """Whether this is the default group beside Megatron's: it carries barriers and objects there.

        Without Megatron's groups, the default group may be what the trainer shards its model over.
        """
        if handle is not dist.group.WORLD:
            return False
        return any(lane_of(other.description) is not Lane.OWN for other in self.handles)

    def _rewire_exports(self) -> bool:
        way, cap = self.wiring.export, self.wiring.export_max_ctas
        kind = PeerCopies if way is Export.COPIES else Communicator
        exporting: dict[tuple[object, ...], list[ManagedGroup]] = {}
        for handle in self.managed() if way is not Export.TRAINING else ():
            if handle.description in self.export_kinds:
                exporting.setdefault((handle.library, handle.ranks), []).append(handle)
        fitting = {
            id(part[0].export)
            for part in exporting.values()
            if (export := part[0].export) is not None
            and (type(export), export.max_ctas) == (kind, cap)
            and export.handles == part
            and export.state is CommunicatorState.LIVE
        }
        old = [export for export in self.exports() if id(export) not in fitting]
        for export in old:
            for handle in export.handles:
                handle.export = None
        release(old)
        missing = [part for part in exporting.values() if part[0].export is None]
        for part in missing:
            export = self._communicator(part[0], cap, kind, prefix="export/")
            export.handles = part
            for handle in part:
                handle.export = export
            export.build()
        return bool(old or missing)

    def _communicator(
        self,
        owner: ManagedGroup,
        max_ctas: int | None,
        kind: type[Communicator] = Communicator,
        prefix: str = "",
    ) -> Communicator:
        return kind(
            prefix + owner.group_name,
            owner.library,
            owner.own_store,
            owner.ranks,
            owner.rank(),
            owner.options,
            max_ctas,
            self.rendezvous,
        )


registry = Registry()


def release(communicators: Iterable[Communicator], *, side_by_side: bool = True) -> None:
    """Destroy communicators, side by side unless told otherwise.

    Destroying waits for NCCL's proxy threads, which look up every 500 ms; one after the other, each waits
    again (docs/decisions/001).
    """
    _run([c.release for c in communicators], side_by_side=side_by_side)


def _run(actions: Sequence[Callable[[], None]], *, side_by_side: bool) -> None:
    if len(actions) < 2 or not side_by_side:
        for action in actions:
            action()
        return
    with ThreadPoolExecutor(max_workers=len(actions), thread_name_prefix="pitstop-groups") as pool:
        for done in [pool.submit(on_current_device(action)) for action in actions]:
            done.result()  # raises what the action raised


def _fits(members: Sequence[ManagedGroup], cap: int | None) -> bool:
    communicator = members[0].communicator
    return communicator.handles == list(members) and communicator.max_ctas == cap


def _torch_groups() -> Any:
    return dist.distributed_c10d._world.pg_map


def register() -> None:
    """Register the backend ``pitstop`` with torch; again, it does nothing."""
    if BACKEND_NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            BACKEND_NAME, registry.create, extended_api=True, devices=["cpu", "cuda"]
        )
