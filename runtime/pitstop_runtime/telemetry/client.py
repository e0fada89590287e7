"""The trainer's side of telemetry: take a record in microseconds, leave the rest to two threads.

Contract: ``submit`` never blocks, never raises and does no I/O. Nothing is dropped without being counted. With a
spool directory, a record that reached the spool reaches the service in the end, whatever is killed in between.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import httpx

from pitstop.loading import digest
from pitstop.telemetry import RunManifest, StepRecord

from .leftovers import Leftovers
from .retry import Patience
from .sender import Sender
from .sending import SendOptions, Shared
from .spool import DEFAULT_CAP_BYTES, Spool
from .stats import Counters, DropReason, QuietLog, TelemetryStats
from .transport import DEFAULT_TIMEOUT_S, Connection, checked_url
from .writer import EndMark, Queue, Writer

DEFAULT_QUEUE_SIZE: Final = 1024
DEFAULT_CLOSE_S: Final = 5.0
_AT_EXIT_S = 2.0
_KEY_LENGTH = 32

_logger = logging.getLogger(__name__)


class _State(Enum):
    OFF = "off"
    ON = "on"
    CLOSED = "closed"
    FORKED = "forked"


class TelemetryClient:
    """Reports the steps of one run.

    One client per run, on one rank. A client with an equal manifest on the same ``spool_dir`` continues the run, so
    give runs that are not the same different ``started_at``. Records that other runs left in ``spool_dir`` are sent
    too, when there is nothing else to do.

    Without a ``url`` nothing is sent: records are kept in ``spool_dir``, or, without that either, not at all, and
    then there is no thread and no cost.
    """

    def __init__(
        self,
        manifest: RunManifest,
        url: str | None,
        spool_dir: Path | None,
        *,
        queue_size: int = DEFAULT_QUEUE_SIZE,
        spool_cap_bytes: int = DEFAULT_CAP_BYTES,
        token: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        options: SendOptions | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Start, without waiting for the disk or the service.

        Args:
            manifest: what stays the same over the run.
            url: address of the service; None to send nothing.
            spool_dir: folder for the spools of all runs; None to keep records in memory only.
            queue_size: records that may wait for the disk; more are dropped.
            spool_cap_bytes: what may wait for the service; beyond it the oldest records are dropped.
            token: bearer token for the service.
            timeout_s: limit of one request.
            options: batches and backoff.
            transport: instead of the network, in tests.

        Raises:
            InvalidInputError: ``url`` is not the address of a web service.
        """
        address = checked_url(url) if url is not None else None
        self._state = _State.OFF
        self._queue: Queue = queue.SimpleQueue()
        self._queue_size = queue_size
        self._counters = Counters()
        self._patience = Patience()
        self._complained = False
        self._threads: list[threading.Thread] = []
        self._ending = threading.Lock()
        self._working = 0
        self._spool: Spool | None = None
        self._writer: Writer | None = None
        if address is None and spool_dir is None:
            return

        log = QuietLog(_logger)
        key = digest(manifest)[:_KEY_LENGTH]
        folder = spool_dir / key if spool_dir is not None else None
        options = options or SendOptions()
        spool = self._spool = Spool(
            folder,
            manifest.model_dump_json().encode(),
            self._counters,
            log,
            cap_bytes=spool_cap_bytes,
            segment_records=options.batch_size,
        )
        self._writer = Writer(self._queue, spool, self._counters, log)
        self._add_thread("writer", self._writer.run)
        if address is not None:
            connect = partial(
                Connection,
                address,
                token=token,
                timeout_s=timeout_s,
                remaining=self._patience.remaining,
                transport=transport,
            )
            shared = Shared(self._patience, self._counters, log, options)
            leftovers = Leftovers(spool_dir, key, shared) if spool_dir is not None else None
            self._add_thread("sender", Sender(spool, leftovers, connect, shared).run)
        self._start()

    def submit(self, record: StepRecord) -> None:
        """Hand a record over. Returns at once and never raises; a record that finds no room is counted."""
        if self._state is not _State.ON:
            self._not_on()
            return
        try:
            # The size may be passed by as many records as threads submit at once: no lock is worth preventing that.
            if self._queue.qsize() >= self._queue_size:
                self._counters.drop(DropReason.QUEUE_FULL, submitted=1)
            else:
                self._queue.put(record)
                self._counters.add(submitted=1)
        except Exception:
            self._complain("telemetry: a record was lost", exc_info=True)

    def stats(self) -> TelemetryStats:
        """What became of the records so far."""
        return self._counters.snapshot(
            queued=self._queued(), spooled=self._spool.waiting if self._spool else 0
        )

    def close(self, timeout_s: float = DEFAULT_CLOSE_S) -> int:
        """Send what is left, for at most ``timeout_s`` seconds.

        Returns:
            how many records were not acknowledged; those on the disk are sent by the next client.
        """
        if self._state is _State.ON:
            self._state = _State.CLOSED
            atexit.unregister(self.close)
            deadline = time.monotonic() + timeout_s
            self._patience.close_within(timeout_s)
            self._queue.put(EndMark.END)
            for thread in self._threads:
                thread.join(max(deadline - time.monotonic(), 0.0))
            self._report()
        left = self.stats()
        return left.queued + left.spooled

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _add_thread(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(
            target=self._run, args=(work,), name=f"pitstop-telemetry-{name}", daemon=True
        )
        self._threads.append(thread)

    def _start(self) -> None:
        self._working = len(self._threads)
        self._state = _State.ON
        _clients.add(self)
        atexit.register(self.close, _AT_EXIT_S)
        for thread in self._threads:
            thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        """A thread's work; the last thread to end lets the spool go."""
        try:
            work()
        except Exception as error:
            self._counters.fail(repr(error))
            _logger.exception("telemetry: a thread ended; records stay where they are")
        finally:
            with self._ending:
                self._working -= 1
                last = self._working == 0
            if last and self._spool is not None:
                self._spool.close()

    def _queued(self) -> int:
        if self._writer is None:
            return 0
        end_mark = self._state is _State.CLOSED and self._threads[0].is_alive()
        return max(self._queue.qsize() - end_mark, 0) + self._writer.in_hand

    def _not_on(self) -> None:
        if self._state is _State.CLOSED:
            self._counters.drop(DropReason.CLOSED, submitted=1)
            self._complain("telemetry: a record was submitted after close and is dropped")
        elif self._state is _State.FORKED:
            self._complain(
                "telemetry: a forked process cannot report for its parent; its records are dropped"
            )

    def _complain(self, message: str, *, exc_info: bool = False) -> None:
        """Log in the trainer's thread, once: logging may be slow."""
        if not self._complained:
            self._complained = True
            with contextlib.suppress(Exception):
                _logger.warning(message, exc_info=exc_info)

    def _report(self) -> None:
        stats = self.stats()
        left = stats.queued + stats.spooled
        if left or stats.dropped:
            dropped = ", ".join(f"{number} {reason}" for reason, number in stats.dropped.items()) or "none"
            _logger.warning(
                "telemetry closed: %d records sent, %d wait in the spool, dropped: %s; last error: %s",
                stats.sent,
                left,
                dropped,
                stats.last_error,
            )
        else:
            _logger.info("telemetry closed: all %d records sent", stats.sent)


_clients: weakref.WeakSet[TelemetryClient] = weakref.WeakSet()


def _switch_off_in_child() -> None:
    """A forked child has no threads of ours, and perhaps a lock that one of them held."""
    for client in list(_clients):
        client._state, client._spool, client._writer = _State.FORKED, None, None
        client._counters = Counters()


os.register_at_fork(after_in_child=_switch_off_in_child)
