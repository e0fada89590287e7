"""The process group that a trainer holds: stable, over a communicator that comes and goes.

A trainer keeps references to groups in scores of places, so the handle stays and what is below it changes.
Torch makes and registers the handle itself (``backend`` registers how), hence names, ranks, functional
collectives, device meshes and object collectives find it like any other group.

Every call goes to the communicator's own group in one step. While there is no communicator, ``_live`` is an
object which raises: a collective on a released group fails at once and says why, it never hangs.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch.distributed import ProcessGroup

from pitstop_runtime.errors import GroupReleasedError
from pitstop_runtime.groups.communicator import Communicator, CommunicatorState, Library, forget_coalescing
from pitstop_runtime.groups.options import GroupOptions

BACKEND_NAME: Final = "pitstop"

# What torch calls on a group, over releases 2.11 to 2.14; those that a release lacks are not defined.
_FORWARDED = (
    "_allgather_base",
    "_enable_collectives_timing",
    "_end_coalescing",
    "_get_sequence_number_for_group",
    "_has_hooks",
    "_reduce_scatter_base",
    "_set_sequence_number_for_group",
    "_start_coalescing",
    "_wait_for_pending_works",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


_WAKE_UP = (
    "Call wake_up() of the SwitchManager first, or do this before sleep(); "
    "weights are gathered inside update_weights()."
)
_REMEDIES = {
    CommunicatorState.BROKEN: "It was broken off after an error on this rank or another: the log says which."
}


class _NotLive:
    """Stands where a live group would: any use raises."""

    def __init__(self, handle: ManagedGroup) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> NoReturn:
        self._handle.refuse(name)


class ManagedGroup(ProcessGroup):
    """A process group over a replaceable communicator. Made by torch for the backend name ``pitstop``.

    Attributes:
        ranks: global ranks of the members.
        options: what the group was made with.
        index: number in the order of creation, of this process.
    """

    def __init__(
        self,
        communicator: Communicator,
        name: str,
        index: int,
        store: Any,
        options: GroupOptions,
    ) -> None:
        super().__init__(communicator.rank, len(communicator.ranks))
        self.ranks = communicator.ranks
        self.library: Library = communicator.library
        self.options = options
        self.index = index
        self.description = "undefined"
        self._name = name
        self.own_store = store
        self._not_live = _NotLive(self)
        self._live: Any = self._not_live
        self.export: Communicator | None = None
        self._exporting = False
        self.communicator = communicator

    # What changes below.

    def attach(self, communicator: Communicator) -> None:
        """Run over this communicator from now on."""
        if self in self.communicator.handles:
            self.communicator.handles.remove(self)
        self.communicator = communicator
        communicator.handles.append(self)
        self.follow()

    def route_to_export(self, active: bool) -> None:
        """While active, and its own communicator is not live, carry collectives over the export communicator."""
        self._exporting = active
        self.follow()

    def follow(self) -> None:
        """Point at what is live now."""
        source = self.communicator
        if not source.ready and self._exporting and self.export is not None:
            source = self.export
        self._point_at(source.inner if source.ready else self._not_live)

    def _point_at(self, live: Any) -> None:
        self._live = live
        for name in _DEFINED:
            if type(live) is ProcessGroup:  # torch's own; isinstance asks it for attributes
                # Found before the method of the class, this saves a call its way through Python
                # (benchmarks/handle_call.py). It is a partial since pybind11 takes the bare method of another
                # group for its own: calls from C++ would not come here any more.
                self.__dict__[name] = partial(getattr(live, name))
            else:
                self.__dict__.pop(name, None)

    def live(self, operation: str) -> Any:
        """The live group below, for an operation.

        Raises:
            GroupReleasedError: there is none.
        """
        if self._live is self._not_live:
            self.refuse(operation)
        return self._live

    def refuse(self, operation: str) -> NoReturn:
        """Raise: there is no live communicator."""
        forget_coalescing(self)
        state = self.communicator.state
        raise GroupReleasedError(
            f"{operation} on process group {self.description} (name {self._name!r}, ranks {list(self.ranks)[:8]}): "
            f"its communicator is {state}. {_REMEDIES.get(state, _WAKE_UP)}"
        )

    # What torch asks of a group itself.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self.description = description

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        return self.description

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Torch's name of the group."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """What the group is for."""
        return self.description

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Name of the backend that made the handle."""
        return BACKEND_NAME

    def name(self) -> str:
        """Name of the backend that made the handle."""
        return BACKEND_NAME

    def _get_backend_name(self) -> str:
        return BACKEND_NAME

    @property
    def _device_types(self) -> list[torch.device]:
        return self.library.device_types

    @property
    def bound_device_id(self) -> torch.device | None:
        """None: torch would split communicators off this one, and a split one cannot be rebuilt alone."""
        return None

    def _get_backend(self, device: torch.device) -> Any:
        device = torch.device(device)
        if device.index is not None and device.type == "cuda":
            # Torch binds a device by asking for its backend; there is no other sign of it.
            self.options.device = self.options.device or device
        return self._live._get_backend(device)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of collectives, of the communicator and of those rebuilt for it."""
        self.communicator.set_timeout(timeout)

    def shutdown(self) -> None:
        """Destroy the communicator, as torch's ``destroy_process_group`` asks; again, it does nothing."""
        _leave(self, Communicator.release)

    def abort(self) -> None:
        """Break off what is under way."""
        _leave(self, Communicator.abort)


def _leave(handle: ManagedGroup, end: Callable[[Communicator], None]) -> None:
    """End what this handle alone uses; a communicator that others share stays."""
    own = handle.communicator
    if [other for other in own.handles if other is not handle]:
        own.handles.remove(handle)
        handle._point_at(handle._not_live)
    else:
        end(own)
    if handle.export is not None and handle in handle.export.handles:
        handle.export.handles.remove(handle)
        if not handle.export.handles:
            end(handle.export)


def _forward(name: str) -> Callable[..., Any]:
    def call(self: ManagedGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._live, name)(*args, **kwargs)

    call.__name__ = name
    return call


_DEFINED = tuple(name for name in _FORWARDED if hasattr(ProcessGroup, name))
for _name in _DEFINED:
    setattr(ManagedGroup, _name, _forward(_name))
