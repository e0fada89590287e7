"""The thread that takes records from the queue, serialises them and puts them into the spool.

It never waits for the service, so a record is on the disk milliseconds after it was submitted.
"""

from __future__ import annotations

import logging
import queue
from enum import Enum

from pitstop.telemetry import StepRecord

from . import lines
from .spool import Spool
from .stats import Counters, DropReason, QuietLog

_LARGEST_BATCH = 500


class EndMark(Enum):
    """Says that no more records follow; not None, which a trainer may submit by mistake."""

    END = "end"


Queue = queue.SimpleQueue[StepRecord | EndMark]
"""Records on their way."""

_logger = logging.getLogger(__name__)


class Writer:
    """From the queue into the spool."""

    def __init__(self, intake: Queue, spool: Spool, counters: Counters, log: QuietLog) -> None:
        self._intake, self._spool, self._counters, self._log = intake, spool, counters, log
        self._reported = 0
        self.in_hand = 0
        """records taken from the queue and not in the spool yet"""

    def run(self) -> None:
        """Work until the end of the queue."""
        more = True
        self._spool.open()  # what an earlier process left is sent without waiting for a record
        while more:
            batch, more = self._next()
            self.in_hand = len(batch)
            self._report_overflow()
            encoded = [line for record in batch if (line := self._encode(record))]
            try:
                self._spool.append(encoded)
            except Exception as error:  # a defect of ours; the records are lost, the thread must live on
                self._counters.drop(DropReason.UNSERIALISABLE, len(encoded))
                self._counters.fail(repr(error))
                _logger.exception("telemetry: %d records lost", len(encoded))
            self.in_hand = 0
        self._spool.finish()

    def _next(self) -> tuple[list[StepRecord], bool]:
        """What is in the queue, at least one record, and whether more may follow."""
        batch: list[StepRecord] = []
        record = self._intake.get()
        try:
            while record is not EndMark.END:
                batch.append(record)
                if len(batch) == _LARGEST_BATCH:
                    return batch, True
                record = self._intake.get_nowait()
        except queue.Empty:
            return batch, True
        return batch, False

    def _encode(self, record: StepRecord) -> bytes | None:
        try:
            return lines.encode(record.model_dump_json().encode())
        except Exception as error:  # whatever a trainer may have put into it
            self._counters.drop(DropReason.UNSERIALISABLE)
            text = f"a record cannot be serialised and is dropped: {error!r}"
            self._counters.fail(text)
            self._log.report("unserialisable", text)
            return None

    def _report_overflow(self) -> None:
        """Log it here: writing to a log may block, which the trainer's thread must not."""
        lost = self._counters.dropped[DropReason.QUEUE_FULL]
        if lost > self._reported:
            self._reported = lost
            self._log.report(
                "queue", f"{lost} records dropped so far: submitted faster than the disk takes them"
            )
