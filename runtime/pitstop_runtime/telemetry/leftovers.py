"""Records of other runs whose processes are gone: they wait beside our folder, and nobody else will send them."""

from __future__ import annotations

import logging
from pathlib import Path

from .delivery import Delivery
from .folder import MANIFEST, leftovers, load_identity
from .retry import Backoff
from .sending import Shared
from .spool import Spool
from .stats import Counters
from .transport import Connection, RefusedError, TemporaryError

_logger = logging.getLogger(__name__)


class Leftovers:
    """What lies in the other folders of a spool directory."""

    def __init__(self, spool_dir: Path, own_key: str, shared: Shared) -> None:
        self._spool_dir, self._own_key, self._shared = spool_dir, own_key, shared
        self._patience, self._log = shared.patience, shared.log

    def send(self, connection: Connection) -> None:
        """Send what can be sent at once. Folders in use are left alone, and so are runs of another service."""
        for folder in leftovers(self._spool_dir, self._own_key):
            identity = load_identity(folder)
            if identity is not None and identity.url not in ("", connection.name):
                continue
            if self._patience.closing or not self._send_folder(folder, connection):
                return

    def _send_folder(self, folder: Path, connection: Connection) -> bool:
        """Whether to go on with the next one."""
        counters = Counters()
        try:
            manifest = (folder / MANIFEST).read_bytes()
        except OSError:
            return True
        spool = Spool(folder, manifest, counters, self._log)
        if not spool.open():
            return True
        # One attempt each: what this run has to say must not wait for an old one.
        retrying = Backoff().retrying(self._patience, lambda _: None, attempts=1)
        delivery = Delivery(spool, connection, retrying, counters, self._log)
        try:
            while not self._patience.closing and (segment := spool.take(0.0)):
                delivery.deliver(segment)
            return True
        except (TemporaryError, RefusedError) as error:
            counters.fail(f"records of an earlier run wait in {folder}: {error}")
            return isinstance(error, RefusedError)  # that may be this run's trouble only
        except Exception as error:
            counters.fail(repr(error))
            _logger.exception("telemetry: sending %s failed", folder)
            return True
        finally:
            spool.close()
            if counters.sent:
                _logger.info("sent %d records that an earlier run had left in %s", counters.sent, folder)
            self._shared.counters.absorb(counters)
