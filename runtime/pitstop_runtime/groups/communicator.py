"""A replaceable communicator: built, released, suspended and resumed by its members alone.

A rebuild never calls ``new_group``: that counts names in every process and has to be called by all ranks in
one order, which a lagging rank breaks. Instead the members meet under a new prefix of the store that the group
was made with (``Rendezvous``), so that nothing of an earlier meeting is ever read again.

An inner ``torch.distributed.ProcessGroup`` carries the collectives. It is torch's own and does all that a group
does; only torch's registry of groups does not know it.
"""

from __future__ import annotations

import logging
from collections import Counter
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from pitstop_runtime.errors import SwitchError, UnsupportedDispositionError, first_line
from pitstop_runtime.groups import nccl
from pitstop_runtime.groups.options import GroupOptions

if TYPE_CHECKING:
    from pitstop_runtime.groups.handle import ManagedGroup

_log = logging.getLogger(__name__)


class CommunicatorState(StrEnum):
    """Whether collectives can run."""

    LIVE = "live"
    SUSPENDED = "suspended"
    RELEASED = "released"
    BROKEN = "broken"  # aborted after an error


class Library(StrEnum):
    """What carries the collectives."""

    NCCL = "nccl"
    GLOO = "gloo"

    @property
    def device_types(self) -> list[torch.device]:
        """Devices whose tensors it takes."""
        return [torch.device("cuda" if self is Library.NCCL else "cpu")]


class Rendezvous:
    """Prefixes of the store under which the members of a communicator meet, each used once.

    A prefix counts the builds of a name within an epoch. All ranks begin an epoch when they have agreed on
    something: then they meet again even if a failure made some of them build more often than others.
    """

    def __init__(self) -> None:
        self.limit_s: float | None = (
            None  # for how long members wait for each other, if not as the group does
        )
        self.epoch = 0
        self._series = 0
        self._builds: Counter[str] = Counter()

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch. Numbers rise; one that does not is the first of a new series, of another manager."""
        self._series += epoch <= self.epoch
        self.epoch = epoch
        self._builds.clear()

    def prefix(self, name: str) -> str:
        """The prefix of the next meeting of this communicator."""
        self._builds[name] += 1
        return f"pitstop/{name}/{self._series}.{self.epoch}.{self._builds[name]}/"


class Communicator:
    """One communicator over ``ranks`` (global) of which this process is number ``rank``.

    ``name`` is equal on all members and unique among a process's communicators. Its
    handles follow each change of state. ``restore_use`` says that it was in use when it was released, so that a
    restore runs a first collective.
    """

    def __init__(
        self,
        name: str,
        library: Library,
        store: Store,
        ranks: tuple[int, ...],
        rank: int,
        options: GroupOptions,
        max_ctas: int | None,
        rendezvous: Rendezvous,
    ) -> None:
        self.name = name
        self.library = library
        self.ranks = ranks
        self.rank = rank
        self.options = options
        self.max_ctas = max_ctas
        self.handles: list[ManagedGroup] = []
        self.state = CommunicatorState.RELEASED
        self._rendezvous = rendezvous
        self.restore_use = False
        self._store = store
        self._inner: ProcessGroup | None = None
        self._timeout = options.timeout  # as far as known, of ``_inner``

    def __str__(self) -> str:
        names = ", ".join(handle.description for handle in self.handles) or self.name
        return f"communicator {names} over ranks {_short(self.ranks)}"

    @property
    def inner(self) -> ProcessGroup:
        """The live group.

        Raises:
            RuntimeError: there is none; a handle answers with a typed error before it asks.
        """
        if self._inner is None or self.state is not CommunicatorState.LIVE:
            raise RuntimeError(f"{self} is {self.state}")
        return self._inner

    @property
    def ready(self) -> bool:
        """Whether collectives can run."""
        return self.state is CommunicatorState.LIVE

    @property
    def backend(self) -> Any:
        """Torch's backend object of the inner group, also while suspended; None if released."""
        return None if self._inner is None else self._inner._get_backend(self.library.device_types[0])

    @property
    def used(self) -> bool:
        """Whether anything is held: NCCL makes its communicator at the first collective, gloo at once."""
        if self._inner is None or self.state is CommunicatorState.BROKEN:
            return False
        return self.library is Library.GLOO or bool(self.backend._is_initialized())

    def build(self) -> None:
        """Make the communicator (with NCCL: the object; memory is taken by the first collective)."""
        if self.state is CommunicatorState.LIVE:
            return
        self.release()  # of what is suspended or broken, nothing may be left behind
        meeting = self._rendezvous
        epoch, store = meeting.epoch, PrefixStore(meeting.prefix(self.name), self._store)
        try:
            inner = build_group(
                self.library,
                store,
                self.ranks,
                self.rank,
                self.options,
                self.max_ctas,
                self.name,
                meeting.limit_s,
            )
        except RuntimeError as error:
            raise SwitchError(f"{self} could not be built: {first_line(error)}") from error
        if meeting.epoch != epoch:
            raise SwitchError(f"{self} was built too late: all ranks had given it up")
        self._inner = inner
        self._timeout = self.options.timeout
        self._enter(CommunicatorState.LIVE)

    def open(self) -> None:
        """Take what a weight sync needs and a pause may not hold: of a communicator, nothing."""

    def close(self) -> None:
        """Give back what ``open`` took."""

    def connect(self) -> None:
        """Make NCCL's communicator now, not at the first collective, if the group was made with a bound device."""
        if self.library is Library.NCCL and self.options.device is not None:
            self.backend.eager_connect_single_device(self.options.device)

    def release(self) -> None:
        """Destroy the communicator; does nothing if there is none."""
        inner, broken = self._inner, self.state is CommunicatorState.BROKEN
        if inner is None:
            return
        self._look_back(inner)
        self._inner = None
        self._enter(CommunicatorState.RELEASED)
        if broken:
            return
        try:
            inner.shutdown()
        except RuntimeError as error:
            # Whatever state it was in, it is gone now; a trainer must not die of a group that was to die.
            _log.warning("%s: destroying it raised %s", self, error)

    def suspend(self) -> None:
        """Give its device memory back, keeping the communicator.

        Raises:
            UnsupportedDispositionError: NCCL cannot, or the communicator shares resources with another.
        """
        if self.state is not CommunicatorState.LIVE or not self.used:
            return
        if self.library is not Library.NCCL:
            raise UnsupportedDispositionError(
                f"{self} cannot be suspended: it is carried by {self.library}. "
                "Use a plan that destroys or keeps the communicators."
            )
        if self.options.split_share:
            raise UnsupportedDispositionError(
                f"{self} cannot be suspended: it was made with split_share = 1 and shares its resources. "
                "Make it without split_share, or use a plan that destroys or keeps the communicators."
            )
        nccl.suspend(self.backend, str(self))
        self._enter(CommunicatorState.SUSPENDED)

    def resume(self) -> None:
        """Take the memory back that ``suspend`` gave away; does nothing unless suspended."""
        if self.state is not CommunicatorState.SUSPENDED:
            return
        nccl.resume(self.backend, str(self))
        self._enter(CommunicatorState.LIVE)

    def abort(self) -> None:
        """Break off what is under way, so that nobody waits for it; only a release and a rebuild help."""
        inner = self._inner
        if inner is None or self.state is CommunicatorState.BROKEN:
            return
        self._look_back(inner)
        self._enter(CommunicatorState.BROKEN)
        try:
            inner.abort()
        except (RuntimeError, NotImplementedError) as error:
            _log.debug("%s: abort raised %s", self, error)

    def memory_bytes(self) -> int | None:
        """Device bytes held; 0 without NCCL, None if NCCL is too old to say."""
        if self.library is not Library.NCCL or not self.used:
            return 0
        return nccl.memory_bytes(self.backend)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of collectives, of this communicator and of those rebuilt for its groups."""
        if self._inner is not None:
            self._inner.set_timeout(timeout)
        self._adopt(timeout)

    def _look_back(self, inner: ProcessGroup) -> None:
        """Keep what a rebuilt communicator has to know: whether this one was used, and a new time limit.

        Torch sets a time limit on the backend without asking the group.
        """
        try:
            self.restore_use = self.restore_use or self.used
            backend = inner._get_backend(self.library.device_types[0])
            timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        except RuntimeError as error:
            _log.debug("%s cannot be asked any more: %s", self, error)
            self.restore_use, timeout = True, None
        if timeout not in (None, self._timeout):
            self._adopt(timeout)

    def _adopt(self, timeout: timedelta) -> None:
        self._timeout = timeout
        for options in (self.options, *(handle.options for handle in self.handles)):
            options.timeout = timeout

    def _enter(self, state: CommunicatorState) -> None:
        self.state = state
        self._follow()

    def _follow(self) -> None:
        for handle in self.handles:
            handle.follow()


def forget_coalescing(group: ProcessGroup) -> None:
    """Before an error leaves a collective: drop what torch has collected of the group.

    Torch opens a coalescing block before it asks the group, and never closes one that an error leaves: later
    collectives would be collected there and silently not run.
    """
    dist.distributed_c10d._world.pg_coalesce_state.pop(group, None)


def build_group(
    library: Library,
    store: Store,
    ranks: tuple[int, ...],
    rank: int,
    options: GroupOptions,
    max_ctas: int | None,
    name: str,
    meeting_s: float | None = None,
) -> ProcessGroup:
    """A group of torch's own class that torch's registry of groups does not know.

    With gloo, its members meet now, and wait ``meeting_s`` for each other.
    """
    backend: Any
    if library is Library.NCCL:
        kind = ProcessGroup.BackendType.NCCL
        backend = dist.ProcessGroupNCCL(store, rank, len(ranks), options.nccl(ranks, name, max_ctas))
    else:
        kind = ProcessGroup.BackendType.GLOO
        limit = options.timeout if meeting_s is None else timedelta(seconds=meeting_s)
        if meeting_s is not None:
            # Gloo would wait for members as long as for a message, and has but one limit for both. Twice: who has
            # given up after the first time is found missing at the second, and nobody goes on to connect to it.
            _meet(store, rank, len(ranks), limit, "here", "all here")
        backend = dist.ProcessGroupGloo(store, rank, len(ranks), timeout=options.timeout)
        # Who is done first must not close the group, or end, while another one still connects to it.
        _meet(store, rank, len(ranks), limit, "connected")
    group = ProcessGroup(store, rank, len(ranks))
    group._set_default_backend(kind)
    if options.device is not None:
        group.bound_device_id = options.device
    for device in library.device_types:
        group._register_backend(device, kind, backend)
    group._set_group_name(name)
    group._set_group_desc("pitstop:inner")
    return group


def _meet(store: Store, rank: int, size: int, limit: timedelta, *places: str) -> None:
    """Wait until all members have come to each place."""
    for place in places:
        store.set(f"{place}/{rank}", "")
        store.wait([f"{place}/{member}" for member in range(size)], limit)


def _short(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"[{shown}{', ...' if len(ranks) > 8 else ''}]"
