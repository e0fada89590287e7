"""The thread that sends what is in the spool and, when nothing is, what earlier runs left beside it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from .delivery import Delivery
from .leftovers import Leftovers
from .segments import Segment
from .sending import Shared
from .spool import Spool
from .transport import Connection, RefusedError, TemporaryError

_IDLE_S = 300.0

_logger = logging.getLogger(__name__)


class Sender:
    """From the spool to the service."""

    def __init__(
        self, spool: Spool, leftovers: Leftovers | None, connect: Callable[[], Connection], shared: Shared
    ) -> None:
        self._spool, self._leftovers, self._connect, self._shared = spool, leftovers, connect, shared
        self._patience, self._counters, self._log = shared.patience, shared.counters, shared.log
        self._leftovers_at = time.monotonic()

    def run(self) -> None:
        """Work until the spool is finished and empty, or the time for closing is over."""
        connection = self._connect()
        try:
            retrying = self._shared.options.backoff.retrying(self._patience, self._on_retry)
            delivery = Delivery(self._spool, connection, retrying, self._counters, self._log)
            while not self._patience.expired():
                idle_s = max(self._leftovers_at - time.monotonic(), 0.0)
                segment = self._spool.take(idle_s)
                if segment is not None:
                    if not self._sent(delivery, segment) and self._patience.closing:
                        return
                elif self._spool.finished:
                    return
                else:
                    self._idle(connection)
        finally:
            connection.close()

    def _sent(self, delivery: Delivery, segment: Segment) -> bool:
        """Send a segment; if that fails, put it back and let some time go by."""
        try:
            delivery.deliver(segment)
            if self._spool.waiting < self._shared.options.batch_size:
                self._patience.pause(self._shared.options.every_s)
            return True
        except TemporaryError as error:  # at closing only
            self._counters.fail(str(error))
        except RefusedError as refusal:
            text = (
                f"the service refuses telemetry, so it waits in the spool: {refusal}. "
                "Check the address, the token and the manifest."
            )
            self._counters.fail(text)
            self._log.report("service", text)
        except Exception as error:  # a defect of ours must not end the thread
            self._counters.fail(repr(error))
            _logger.exception("telemetry: sending failed")
        self._spool.release(segment)
        self._patience.pause(self._shared.options.refused_pause_s)
        return False

    def _idle(self, connection: Connection) -> None:
        self._leftovers_at = time.monotonic() + _IDLE_S
        if self._leftovers is not None and not self._patience.closing:
            self._leftovers.send(connection)

    def _on_retry(self, error: BaseException) -> None:
        self._counters.fail(str(error), retries=1)
        self._log.report("retry", f"telemetry waits in the spool, the service is tried again: {error}")
