"""How ranks agree, over a gloo group of their own that no switch ever touches.

Every decision is one all-reduce of minima: of the number of the lowest rank that objects (fatally or not), and
of a fingerprint of what is to be done and its negative. So one small message says whether all consent to the
same thing, and if not, who does not. What a rank objects to lies in the rendezvous store by then.

A rank that stalls or dies is found by its absence: when the all-reduce times out, those that live sign in the
store, and who has not signed after a grace period is named.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pitstop_runtime.errors import RankFailedError, first_line

_log = logging.getLogger(__name__)

_GRACE_S = 3.0
_POLL_S = 0.1
_SHOWN_RANKS = 8
_NO_DISSENT = 2**62


@dataclass(frozen=True, slots=True)
class Objection:
    """The lowest rank that does not consent, and why. ``fatal``: there is no way on, not even the baseline."""

    rank: int
    reason: str
    fatal: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.reason}"


class Control:
    """Agreement among all ranks. Made by all ranks at the same point, once per process.

    ``timeout_s`` bounds every wait for other ranks.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        limit = timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=limit, group_desc="PITSTOP_CONTROL")
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore("pitstop/control/", store)
        self._sequence = 0

    @property
    def sequence(self) -> int:
        """Number of agreements so far, equal on all ranks."""
        return self._sequence

    def agree(
        self, what: str, objection: str | None = None, fingerprint: int = 0, *, fatal: bool = False
    ) -> Objection | None:
        """Wait for all ranks, and say who objects; None if all consent to the same fingerprint.

        Args:
            what: what is being agreed on, for messages.
            objection: why this rank does not consent, None if it does.
            fingerprint: 62-bit number that has to be equal on all ranks.
            fatal: the objection leaves no way on.

        Raises:
            RankFailedError: a rank did not come within the time limit.
        """
        self._sequence += 1
        if objection is not None:
            self._store.set(f"objection/{self._sequence}/{self.rank}", objection)
        votes = [
            _NO_DISSENT if objection is None or severe is not fatal else self.rank for severe in (True, False)
        ]
        fatally, mildly, least, negative_most = self._minima([*votes, fingerprint, -fingerprint], what)
        for rank, severe in ((fatally, True), (mildly, False)):
            if rank != _NO_DISSENT:
                return Objection(rank, self._read(f"objection/{self._sequence}/{rank}"), severe)
        if least != -negative_most:
            reason = f"{what}: ranks want different things (fingerprints {least} to {-negative_most})"
            return Objection(self.rank, reason, fatal=True)
        return None

    def any(self, flag: bool, what: str) -> bool:
        """Whether any rank raises the flag.

        Raises:
            RankFailedError: a rank did not come within the time limit.
        """
        self._sequence += 1
        return self._minima([0 if flag else 1], what) == [0]

    def share(self, value: Any, source: int = 0) -> Any:
        """The value of one rank, on all ranks; it has to be picklable.

        Raises:
            RankFailedError: a rank did not come within the time limit.
        """
        box = [value]
        with self._naming_the_lost("sharing a decision"):
            dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]

    def union(self, names: list[str]) -> list[str]:
        """All names of all ranks, sorted.

        Raises:
            RankFailedError: a rank did not come within the time limit.
        """
        found: list[list[str] | None] = [None] * self.size
        with self._naming_the_lost("comparing communicators"):
            dist.all_gather_object(found, names, group=self._group)
        return sorted({name for each in found for name in each or ()})

    def raise_alarm(self, reason: str) -> None:
        """Tell the ranks that wait inside somebody else's collective that this one will not come."""
        try:
            # Only the first alarm counts: others follow from it.
            self._store.compare_set(f"alarm/{self._sequence}", "", f"rank {self.rank}: {reason}")
        except RuntimeError:
            _log.warning("could not raise the alarm: the rendezvous store is gone")

    def alarm(self) -> str | None:
        """The first alarm since the last agreement, if there is one."""
        key = f"alarm/{self._sequence}"
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError:
            return None

    def watch(self, on_alarm: Callable[[str], None]) -> Watch:
        """Watch for an alarm in a thread until the returned object is closed."""
        return Watch(self._store, f"alarm/{self._sequence}", on_alarm)

    def close(self) -> None:
        """Destroy the group."""
        if dist.is_initialized() and self._group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(self._group)

    def _minima(self, numbers: list[int], what: str) -> list[int]:
        votes = torch.tensor(numbers, dtype=torch.int64)
        with self._naming_the_lost(what):
            dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._group)
        return [int(vote) for vote in votes]

    @contextmanager
    def _naming_the_lost(self, what: str) -> Iterator[None]:
        """Turn the error of a collective that not all ranks came to into one that says who is missing."""
        try:
            yield
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def _lost(self, what: str, error: Exception) -> RankFailedError:
        """The error for a rank that did not come, with its number if the store can tell."""
        try:
            missing = self._absent()
        except RuntimeError:
            who = "which rank is not known, for the rendezvous store (hosted by rank 0) is gone too"
        else:
            shown = ", ".join(map(str, missing[:_SHOWN_RANKS]))
            more = f" and {len(missing) - _SHOWN_RANKS} more" if len(missing) > _SHOWN_RANKS else ""
            who = (
                f"missing: rank {shown}{more}"
                if missing
                else "all ranks are alive, but not at the same point"
            )
        return RankFailedError(
            f"rank {self.rank} waited for all ranks ({what}) for at most {self.timeout_s:g} s; {who}. "
            f"Cause: {first_line(error)}. Restart the job from its last checkpoint."
        )

    def _absent(self) -> list[int]:
        """Ranks that do not sign within the grace period."""
        key = f"alive/{self._sequence}"
        self._store.set(f"{key}/{self.rank}", "1")
        absent = set(range(self.size)) - {self.rank}
        deadline = time.monotonic() + _GRACE_S
        while absent and time.monotonic() < deadline:
            absent = {rank for rank in absent if not self._store.check([f"{key}/{rank}"])}
            if absent:
                time.sleep(_POLL_S)
        return sorted(absent)

    def _read(self, key: str) -> str:
        try:
            self._store.wait([key], timedelta(seconds=_GRACE_S))
            return str(self._store.get(key).decode())
        except RuntimeError:
            return "(its reason could not be read)"


class Watch:
    """A thread that looks for an alarm; a context manager."""

    def __init__(self, store: dist.Store, key: str, on_alarm: Callable[[str], None]) -> None:
        self._store, self._key, self._on_alarm = store, key, on_alarm
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pitstop-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            try:
                if self._store.check([self._key]):
                    self._on_alarm(self._store.get(self._key).decode())
                    return
            except RuntimeError:
                return  # the store is gone: the agreement that follows will say so
