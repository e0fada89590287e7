"""Bring the records of a spool to the service: register the run, send batches, sort out what is refused."""

from __future__ import annotations

import json
import logging
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import tenacity

from .refusals import about_records, judge
from .segments import Segment
from .spool import Spool
from .stats import Counters, DropReason, QuietLog
from .transport import Connection, RefusedError, TemporaryError, idempotency_key

_RUNS = "/v1/runs"

_logger = logging.getLogger(__name__)


class _NotRegisteredError(RefusedError):
    """The service refuses the run itself."""


@dataclass(frozen=True, slots=True)
class _Refused:
    record: bytes
    status: int
    reason: str


class Delivery:
    """Sends one run's spool over a connection."""

    def __init__(
        self,
        spool: Spool,
        connection: Connection,
        retrying: tenacity.Retrying,
        counters: Counters,
        log: QuietLog,
    ) -> None:
        self._spool, self._connection, self._retrying = spool, connection, retrying
        self._counters, self._log = counters, log

    def deliver(self, segment: Segment) -> None:
        """Send a taken segment and remove it.

        Raises:
            TemporaryError: time or attempts ran out; all of the segment will be sent again.
            RefusedError: the service refuses to deal with us, whatever the records.
        """
        records = self._spool.read(segment)
        refused = self._send(records) if records else []
        self._keep_refused(refused)
        self._counters.add(sent=len(records) - len(refused))
        self._spool.done(segment)

    def _send(self, batch: list[bytes]) -> list[_Refused]:
        """Send a batch, in parts if some of its records are refused; returns those."""
        refused: list[_Refused] = []
        left, lost = [batch], self._spool.identity.lost
        while left:
            part = left.pop()
            try:
                self._retrying(self._post, part)
            except RefusedError as refusal:
                if isinstance(refusal, _NotRegisteredError) or not about_records(refusal):
                    raise
                verdict = judge(part, refusal)
                refused += [_Refused(record, refusal.status, reason) for record, reason in verdict.refused]
                left.extend(reversed(verdict.again))
            if self._spool.identity.lost != lost:
                lost = self._spool.identity.lost
                if len(part) < len(batch):  # the parts before this one went with the lost run
                    refused, left = [], [batch]
        return refused

    def _post(self, batch: list[bytes]) -> None:
        """Send one batch, once."""
        run_id = self._registered()
        path, body = f"{_RUNS}/{run_id}/steps", b'{"steps":[%b]}' % b",".join(batch)
        key = idempotency_key(self._spool.identity.namespace, path.encode(), body)
        try:
            answer = self._connection.post(path, body, key)
        except RefusedError as refusal:
            if refusal.status != 404 or refusal.document is None:
                raise
            self._spool.save_identity(replace(self._spool.identity, run_id=None, lost=run_id))
            text = f"{self._connection.name} does not know run {run_id} any more: it is registered again"
            _logger.warning("%s, and gets what is still in the spool; what it had acknowledged is lost", text)
            raise TemporaryError(text) from refusal  # so that a service which forgets at once is not hammered
        stored, duplicates = answer.get("stored"), answer.get("duplicates")
        if (
            not isinstance(stored, int)
            or not isinstance(duplicates, int)
            or stored + duplicates != len(batch)
        ):
            raise TemporaryError(
                f"{self._connection.name} did not acknowledge {len(batch)} records: {answer}"[:300]
            )

    def _registered(self) -> str:
        """The run's id at this service, registered if need be."""
        identity = self._spool.identity
        here = identity.url == self._connection.name
        if here and identity.run_id:
            return identity.run_id
        lost = identity.lost if here else None
        key = idempotency_key(identity.namespace, _RUNS.encode(), (lost or "").encode(), self._spool.manifest)
        try:
            answer = self._connection.post(_RUNS, self._spool.manifest, key)
            run_id = str(uuid.UUID(answer["id"]))
        except (KeyError, ValueError, TypeError, AttributeError):
            raise TemporaryError(f"{self._connection.name} registered the run without an id") from None
        except RefusedError as refusal:
            raise _NotRegisteredError(refusal.status, refusal.document) from refusal
        self._spool.save_identity(replace(identity, url=self._connection.name, run_id=run_id, lost=lost))
        _logger.info("run registered at %s as %s", self._connection.name, run_id)
        return run_id

    def _keep_refused(self, refused: list[_Refused]) -> None:
        if not refused:
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        lines = []
        for item in refused:
            line: dict[str, Any] = {"refused_at": now, "status": item.status, "reason": item.reason}
            line["record"] = json.loads(item.record)
            lines.append(json.dumps(line).encode() + b"\n")
        kept = "kept in refused.jsonl beside the spool" if self._spool.refuse(lines) else "kept nowhere"
        self._counters.drop(DropReason.REFUSED, len(refused))
        first = json.loads(refused[0].record).get("step")
        text = f"{len(refused)} records refused, {kept}; the first is step {first}: {refused[0].reason}"
        self._counters.fail(text)
        self._log.report("refused", text)
