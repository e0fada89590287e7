"""What became of every record: nothing is dropped without being counted and logged."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class DropReason(StrEnum):
    """Why a record will not reach the service."""

    QUEUE_FULL = "queue_full"
    SPOOL_FULL = "spool_full"
    REFUSED = "refused"
    CORRUPTED = "corrupted"
    UNSERIALISABLE = "unserialisable"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class TelemetryStats:
    """Records by what became of them.

    At rest, ``submitted + recovered == queued + spooled + sent + dropped_total``.
    """

    submitted: int
    recovered: int
    """found in the spool, left there by an earlier process"""
    queued: int
    """not written to the spool yet"""
    spooled: int
    """in the spool and not acknowledged; in memory instead where the disk failed"""
    sent: int
    """acknowledged by the service, those that it had before included"""
    dropped: Mapping[DropReason, int]
    retries: int
    last_error: str | None

    @property
    def dropped_total(self) -> int:
        """Dropped records, whatever the reason."""
        return sum(self.dropped.values())


class Counters:
    """Counts that several threads add to.

    The lock is held for single additions only, and reentrant because a signal handler may submit.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.submitted = 0
        self.recovered = 0
        self.sent = 0
        self.retries = 0
        self.dropped: Counter[DropReason] = Counter()
        self.last_error: str | None = None

    def add(self, *, submitted: int = 0, recovered: int = 0, sent: int = 0) -> None:
        """Count records."""
        with self._lock:
            self.submitted += submitted
            self.recovered += recovered
            self.sent += sent

    def drop(self, reason: DropReason, number: int = 1, *, submitted: int = 0) -> None:
        """Count dropped records, of which ``submitted`` had not been counted so far."""
        with self._lock:
            self.submitted += submitted
            self.dropped[reason] += number

    def fail(self, error: str, *, retries: int = 0) -> None:
        """Keep the newest error; ``retries`` if the request is sent again."""
        with self._lock:
            self.retries += retries
            self.last_error = error

    def absorb(self, other: Counters) -> None:
        """Add what was done for an earlier process's spool: only what left that spool counts as recovered."""
        with other._lock:
            sent, dropped, retries, error = other.sent, other.dropped.copy(), other.retries, other.last_error
        with self._lock:
            self.recovered += sent + dropped.total()
            self.sent += sent
            self.retries += retries
            self.dropped.update(dropped)
            self.last_error = error or self.last_error

    def snapshot(self, *, queued: int, spooled: int) -> TelemetryStats:
        """All counts at one moment."""
        with self._lock:
            return TelemetryStats(
                submitted=self.submitted,
                recovered=self.recovered,
                queued=queued,
                spooled=spooled,
                sent=self.sent,
                dropped={reason: number for reason, number in self.dropped.items() if number},
                retries=self.retries,
                last_error=self.last_error,
            )


class QuietLog:
    """Warnings that say the same thing at most once in a while, and how often they were held back."""

    def __init__(
        self, logger: logging.Logger, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger, self._every_s, self._clock = logger, every_s, clock
        self._lock = threading.Lock()
        self._next: dict[str, float] = {}
        self._held: Counter[str] = Counter()

    def report(self, topic: str, message: str) -> None:
        """Log a warning, unless one on this topic was logged a moment ago."""
        with self._lock:
            now = self._clock()
            if now < self._next.get(topic, now):
                self._held[topic] += 1
                return
            self._next[topic] = now + self._every_s
            held = self._held.pop(topic, 0)
        more = f" ({held} warnings like this were held back)" if held else ""
        self._logger.warning("%s%s", message, more)
