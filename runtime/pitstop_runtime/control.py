"""How ranks agree, over a gloo group of their own that no switch ever touches.

Every decision is one all-reduce of minima: of the number of the lowest rank that objects (fatally or not), and
of a fingerprint of what is to be done and its negative. So one small message says whether all consent to the
same thing, and if not, who does not. Then that one tells the others why.

A rank that stalls or dies is found by its absence: when the all-reduce fails or times out, those that live sign in
the store, and who has not signed after a grace period is named, with the component that it noted last. Some learn of
a death at once, others by their time limit only; so all that wait look from time to time whether another rank has
given up.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pitstop_runtime.board import Board, SilentStoreError
from pitstop_runtime.errors import RankFailedError, SwitchError, first_line

_log = logging.getLogger(__name__)

_GRACE_S = 3.0
_LOOK_S = 0.5
_POLL_S = 0.1
_FIRST_POLL_S = 0.001  # of a meeting that the ranks come to at nearly the same time
_STORE_CALLS_PER_S = 5000  # of all ranks together, while they watch for something
_SHOWN_RANKS = 8
_NO_DISSENT = 2**62
_GROUP = "PITSTOP_CONTROL"

# Counts the agreements of all managers that this process ever makes: what one left in the store, the next must not
# take for its own.
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Objection:
    """The lowest rank that does not consent, and why.

    ``fatal``: there is no way on, not even the baseline. ``differs``: nobody objects, but ranks want different things.
    """

    rank: int
    reason: str
    fatal: bool = False
    differs: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.reason}"


class Control:
    """Agreement among all ranks. Made by all ranks at the same point, once per process.

    ``timeout_s`` bounds every wait for other ranks.

    Raises:
        RankFailedError: a rank did not come within the time limit.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = Board("pitstop/control/", _GRACE_S)
        self._sequence = next(_numbers)
        self._here = ""
        with self.naming_the_lost("making the manager"):
            limit = timedelta(seconds=timeout_s)
            self._group = dist.new_group(backend="gloo", timeout=limit, group_desc=_GROUP)

    def __str__(self) -> str:
        return f"communicator {_GROUP} over all {self.size} ranks"

    @property
    def sequence(self) -> int:
        """Number of agreements so far, equal on all ranks."""
        return self._sequence

    def agree(
        self, what: str, objection: str | None = None, fingerprint: int = 0, *, fatal: bool = False
    ) -> Objection | None:
        """Wait for all ranks, and say who objects; None if all consent to the same fingerprint.

        If a rank raised an alarm, what went wrong on others follows from that: they object on its behalf.

        Args:
            what: what is being agreed on, for messages.
            objection: why this rank does not consent, None if it does.
            fingerprint: 62-bit number that has to be equal on all ranks.
            fatal: the objection leaves no way on.

        Raises:
            RankFailedError: a rank did not come within the time limit.
        """
        objector = _NO_DISSENT if objection is None else self._first_to_fail()
        self._sequence = next(_numbers)
        votes = [objector if severe is fatal else _NO_DISSENT for severe in (True, False)]
        fatally, mildly, least, negative_most = self._minima(
            [*votes, fingerprint, -fingerprint], what, objection
        )
        for rank, severe in ((fatally, True), (mildly, False)):
            if rank != _NO_DISSENT:
                return Objection(rank, self.share(objection, rank), severe)
        if least != -negative_most:
            reason = f"{what}: ranks want different things (fingerprints {least} to {-negative_most})"
            return Objection(self.rank, reason, fatal=True, differs=True)
        return None

    def any(self, flag: bool, what: str) -> bool:
        """Whether any rank raises the flag.

        Raises:
            RankFailedError: a rank did not come within the time limit.
        """
        self._sequence = next(_numbers)
        return self._minima([0 if flag else 1], what) == [0]

    def share(self, value: Any, source: int = 0) -> Any:
        """The value of one rank, on all ranks; it has to be picklable.

        Raises:
            RankFailedError: a rank did not come within the time limit.
        """
        box, what = [value], "sharing a decision"
        self._minima([0], what)  # finds a rank that is lost; the broadcast would not name it
        with self.naming_the_lost(what):
            dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]

    def union(self, names: list[str]) -> list[str]:
        """All names of all ranks, sorted.

        Raises:
            RankFailedError: a rank did not come within the time limit.
        """
        found: list[list[str] | None] = [None] * self.size
        what = "comparing communicators"
        self._minima([0], what)  # as in ``share``
        with self.naming_the_lost(what):
            dist.all_gather_object(found, names, group=self._group)
        return sorted({name for each in found for name in each or ()})

    # Notes for other ranks, which read them if something goes wrong.

    def note(self, where: str, *, beside: bool = False) -> None:
        """Leave word of what this rank is about to do, or of what it begins in a thread beside that (empty: ended)."""
        if not beside:
            self._here = where
        with suppress(RuntimeError):
            self._store.set(f"{'beside' if beside else 'at'}/{self.rank}", where)

    def come(self, name: str) -> None:
        """Leave word that this rank has come to a meeting that has no time limit of its own."""
        with suppress(RuntimeError):
            self._store.set(f"come/{self._sequence}/{name}/{self.rank}", "1")

    def meet(self, name: str, ranks: Sequence[int]) -> None:
        """Come to a meeting and wait for its other ranks: to be called in a thread that has a time limit.

        What cannot be ended once it waits for other ranks begins when all of them are there.

        Raises:
            SwitchError: all ranks have agreed on something since, so it was given up.
            RuntimeError: the store is gone.
        """
        self.come(name)
        sequence, pause_s = self._sequence, _FIRST_POLL_S
        keys = [f"come/{sequence}/{name}/{rank}" for rank in ranks]
        while not self._store.check(*keys):
            if self._sequence != sequence:
                raise SwitchError(f"{name}: given up long ago")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, self._gently(_POLL_S))

    def not_come(self, name: str, ranks: Sequence[int]) -> str:
        """Which ranks did not come to a meeting, as the end of a sentence; empty if that is not known."""
        try:
            return self._shown(
                [rank for rank in ranks if not self._store.check(f"come/{self._sequence}/{name}/{rank}")]
            )
        except RuntimeError:
            return ""

    def raise_alarm(self, reason: str) -> None:
        """Tell the ranks that wait inside somebody else's collective that this one will not come."""
        try:
            # Only the first alarm counts: others follow from it.
            self._store.set_first(f"alarm/{self._sequence}", f"rank {self.rank}: {reason}")
        except RuntimeError:
            _log.warning("could not raise the alarm: the rendezvous store is gone")

    def alarm(self) -> str | None:
        """The first alarm since the last agreement, if there is one."""
        key = f"alarm/{self._sequence}"
        try:
            return self._store.get(key) if self._store.check(key) else None
        except RuntimeError:
            return None

    def _first_to_fail(self) -> int:
        alarm = self.alarm()
        return self.rank if alarm is None else int(alarm.split(":", 1)[0].removeprefix("rank "))

    def watch(self, on_alarm: Callable[[str], None]) -> Watch:
        """Watch for an alarm in a thread until the returned object is closed."""
        return Watch(self._store, f"alarm/{self._sequence}", on_alarm, self._gently(_POLL_S))

    def close(self) -> None:
        """Destroy the group."""
        if dist.is_initialized() and self._group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(self._group)

    @contextmanager
    def naming_the_lost(self, what: str, objection: str | None = None) -> Iterator[None]:
        """Turn the error of a collective that not all ranks came to into one that says who is missing."""
        try:
            yield
        except RuntimeError as error:
            text = self._lost(what, error)
            if objection is not None:
                text = (
                    f"{objection}; {text}"  # what this rank knows itself may be why the others did not come
                )
            _log.error("no agreement over %s: %s", self, text)
            raise RankFailedError(text) from error

    def _minima(self, numbers: list[int], what: str, objection: str | None = None) -> list[int]:
        votes = torch.tensor(numbers, dtype=torch.int64)
        with self.naming_the_lost(what, objection):
            self._wait(dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._group, async_op=True))
        return [int(vote) for vote in votes]

    def _wait(self, work: Any) -> None:
        """Wait for a collective, but no longer than until another rank has given up."""
        look = timedelta(seconds=self._gently(_LOOK_S))
        while not work.is_completed():
            try:
                work.wait(look)
            except RuntimeError:
                # Its own error is raised below; that this wait was over is none.
                if not work.is_completed() and self._given_up():
                    raise RuntimeError("another rank has given up waiting") from None
        work.wait()

    def is_lost(self) -> bool:
        """Whether another rank, already in the next agreement, has found that one does not come to it."""
        try:
            return self._store.check(f"lost/{self._sequence + 1}")
        except RuntimeError:
            return False  # if the store is gone, the agreement will say so

    def _given_up(self) -> bool:
        try:
            return self._store.check(f"lost/{self._sequence}")
        except SilentStoreError:
            return False  # it may be slow only: the time limit decides

    def _gently(self, seconds: float) -> float:
        """An interval of asking the store, longer where many ranks ask it."""
        return max(seconds, self.size / _STORE_CALLS_PER_S)

    def _lost(self, what: str, error: Exception) -> str:
        """What to say of a rank that did not come, with its number if the store can tell."""
        try:
            absent = self._absent()
        except RuntimeError:
            who = "missing: rank 0, it seems, for the rendezvous store that it hosts is gone or frozen"
        else:
            who = f"missing: {absent}" if absent else "all ranks are alive, but not at the same point"
        here = f" (last in {self._here})" if self._here else ""
        return (
            f"rank {self.rank}{here} waited for all ranks ({what}) for at most {self.timeout_s:g} s; {who}. "
            f"Cause: {first_line(error)}. Restart the job from its last checkpoint."
        )

    def _absent(self) -> str:
        """Ranks that do not sign within the grace period. The first to give up looks, the others take its word."""
        self._store.set(f"alive/{self._sequence}/{self.rank}", "1")
        answer = f"absent/{self._sequence}"
        if self._store.add(f"lost/{self._sequence}", 1) > 1:
            try:
                absent = self._store.get(answer, 2 * _GRACE_S)
            except RuntimeError:
                _log.debug("the rank that was looking is gone too")
            else:
                self._leave()
                return absent
        # Those that wait for a lost rank in the export break off, and have the time to sign.
        self._store.set_first(f"alarm/{self._sequence - 1}", f"rank {self.rank}: not all ranks came")
        absent = self._shown(self._unsigned("alive", range(self.size)))
        self._store.set(answer, absent)
        self._leave()
        return absent

    def _leave(self) -> None:
        """Rank 0 hosts the store: it must not go before the others have read there who is absent."""
        self._store.set(f"read/{self._sequence}/{self.rank}", "1")
        if self.rank == 0:
            living = [rank for rank in range(self.size) if self._signed("alive", rank)]
            self._unsigned("read", living)

    def _unsigned(self, sheet: str, ranks: Sequence[int]) -> list[int]:
        """Those of the ranks that do not sign within the grace period."""
        left = list(ranks)
        deadline = time.monotonic() + _GRACE_S
        while left and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            left = [rank for rank in left if not self._signed(sheet, rank)]
        return left

    def _signed(self, sheet: str, rank: int) -> bool:
        return self._store.check(f"{sheet}/{self._sequence}/{rank}")

    def _shown(self, ranks: Sequence[int]) -> str:
        """Ranks in words, with what they noted last."""
        if not ranks:
            return ""
        places = [self._place(rank) for rank in ranks[:_SHOWN_RANKS]]
        shown = ", ".join(f"{rank}{place}" for rank, place in zip(ranks, places, strict=False))
        more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
        return f"rank {shown}{more}"

    def _place(self, rank: int) -> str:
        try:
            at, beside = (
                self._store.get(key) if self._store.check(key) else ""
                for key in (f"at/{rank}", f"beside/{rank}")
            )
        except RuntimeError:
            return ""
        return f" (last seen in {at}{f', beside that in {beside}' if beside else ''})" if at else ""


class Watch:
    """A thread that looks for an alarm; a context manager."""

    def __init__(
        self, store: Board, key: str, on_alarm: Callable[[str], None], every_s: float = _POLL_S
    ) -> None:
        self._store, self._key, self._on_alarm, self._every_s = store, key, on_alarm, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pitstop-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                if self._store.check(self._key):
                    self._on_alarm(self._store.get(self._key))
                    return
            except RuntimeError:
                return  # the store is gone: the agreement that follows will say so
