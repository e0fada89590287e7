"""The plan that the service recommends for a scenario, fetched in the background, and what became of it.

``current`` says at once what the newest answer was. Without an answer there is no recommendation, and the trainer
does what it would have done anyway: nothing here waits for the service or raises into the trainer.
"""

from __future__ import annotations

import atexit
import json
import logging
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Final, Self
from urllib.parse import quote

import httpx
import tenacity
from pydantic import AwareDatetime, Field, ValidationError

from pitstop.loading import digest
from pitstop.plan import Plan
from pitstop.scenario import Scenario, StrictModel

from .telemetry.retry import Backoff, Patience
from .telemetry.stats import QuietLog
from .telemetry.transport import (
    DEFAULT_TIMEOUT_S,
    Connection,
    RefusedError,
    TemporaryError,
    checked_url,
)

DEFAULT_POLL_S: Final = 60.0
_CURRENT = "/v1/recommendations/current"
_JITTER = 0.2  # so that trainers started together do not ask together
_ATTEMPTS = 3  # the next poll comes anyway
_LONGEST_DETAIL = 2000
_MOST_OUTCOMES = 64
_AT_EXIT_S = 2.0

_logger = logging.getLogger(__name__)


class Recommendation(StrictModel):
    """A plan to carry out until it expires."""

    id: str = Field(min_length=1, max_length=100)
    plan: Plan
    expires_at: AwareDatetime
    reason: str = Field(default="", max_length=2000, description="why this plan")


class Outcome(StrEnum):
    """What the trainer did with a recommendation."""

    APPLIED = "applied"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class _Report:
    recommendation_id: str
    body: bytes
    key: uuid.UUID = field(default_factory=uuid.uuid4)


class RecommendationClient:
    """Polls for the recommendation of one scenario. Without a ``url`` it is off: no thread, no recommendation."""

    def __init__(
        self,
        url: str | None,
        scenario: Scenario,
        *,
        poll_s: float = DEFAULT_POLL_S,
        token: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        backoff: Backoff | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Start polling.

        Args:
            url: address of the service; None for no recommendations.
            scenario: what the plan is for.
            poll_s: mean seconds between two polls.
            token: bearer token for the service.
            timeout_s: limit of one request.
            backoff: between the attempts of one poll.
            transport: instead of the network, in tests.

        Raises:
            InvalidInputError: ``url`` is not the address of a web service.
        """
        self._poll_s, self._digest = poll_s, digest(scenario)
        self._newest: Recommendation | None = None
        self._etag: str | None = None
        self._outcomes: deque[_Report] = deque()
        self._wake = threading.Event()
        self._patience = Patience()
        self._log = QuietLog(_logger)
        self._thread: threading.Thread | None = None
        if url is None:
            return
        connect = partial(
            Connection,
            checked_url(url),
            token=token,
            timeout_s=timeout_s,
            remaining=self._patience.remaining,
            transport=transport,
        )
        backoff = backoff or Backoff()
        self._retrying = backoff.retrying(self._patience, self._on_retry, _ATTEMPTS)
        self._retrying_to_the_end = backoff.retrying(self._patience, self._on_retry)
        self._thread = threading.Thread(
            target=self._run, args=(connect,), name="pitstop-recommendation", daemon=True
        )
        atexit.register(self.close, _AT_EXIT_S)
        self._thread.start()

    def current(self) -> Recommendation | None:
        """The newest recommendation, if there is one and it has not expired. Returns at once, never raises."""
        newest = self._newest
        return newest if newest is not None and datetime.now(UTC) < newest.expires_at else None

    def report(self, recommendation_id: str, outcome: Outcome | str, detail: str = "") -> None:
        """Tell the service, in the background, what became of a recommendation. Never raises."""
        if self._thread is None:
            return
        try:
            document = {"outcome": Outcome(outcome), "detail": detail[:_LONGEST_DETAIL]}
            if self._patience.closing or len(self._outcomes) >= _MOST_OUTCOMES:
                _logger.warning("outcome of recommendation %s dropped: %s", recommendation_id, document)
                return
            self._outcomes.append(_Report(recommendation_id, json.dumps(document).encode()))
            self._wake.set()
        except Exception:
            _logger.warning("outcome of recommendation %s not reported", recommendation_id, exc_info=True)

    def close(self, timeout_s: float = 5.0) -> int:
        """Stop polling and send what is reported, for at most ``timeout_s`` seconds.

        Returns:
            how many outcomes were not sent; they are lost.
        """
        if self._thread is not None and not self._patience.closing:
            atexit.unregister(self.close)
            self._patience.close_within(timeout_s)
            self._wake.set()
            self._thread.join(timeout_s)
            if self._outcomes:
                _logger.warning("%d outcomes of recommendations could not be reported", len(self._outcomes))
        return len(self._outcomes)

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _run(self, connect: Callable[[], Connection]) -> None:
        try:
            connection = connect()
            try:
                self._work(connection)
            finally:
                connection.close()
        except Exception:
            _logger.exception("recommendations: the thread ended; the last one holds until it expires")

    def _work(self, connection: Connection) -> None:
        poll_at = time.monotonic()
        while True:
            closing = self._patience.closing  # read first: what was reported before it is sent below
            self._send_outcomes(connection, self._retrying_to_the_end if closing else self._retrying)
            if closing:
                return
            if time.monotonic() >= poll_at:
                self._poll(connection)
                poll_at = time.monotonic() + self._poll_s * random.uniform(1 - _JITTER, 1 + _JITTER)
            self._wake.wait(max(poll_at - time.monotonic(), 0.0))
            self._wake.clear()

    def _poll(self, connection: Connection) -> None:
        """Fetch the newest recommendation; an answer that makes no sense leaves the last one in force."""
        try:
            answer = self._retrying(connection.get, _CURRENT, {"scenario_digest": self._digest}, self._etag)
            if answer.document is None:  # not modified
                return
            self._newest = Recommendation.model_validate(answer.document)
            self._etag = answer.etag
        except RefusedError as refusal:
            if refusal.status == httpx.codes.NOT_FOUND:
                self._newest = self._etag = None
            else:
                self._log.report("refused", f"no recommendation: {refusal}")
        except TemporaryError as error:
            self._log.report("poll", f"no recommendation: {error}")
        except ValidationError as error:
            self._log.report("invalid", f"a recommendation that cannot be read is ignored: {error}")

    def _send_outcomes(self, connection: Connection, retrying: tenacity.Retrying) -> None:
        """Send what is reported, in order; what cannot be sent now waits for the next poll."""
        while self._outcomes:
            report = self._outcomes[0]
            path = f"/v1/recommendations/{quote(report.recommendation_id, safe='')}/outcomes"
            try:
                retrying(connection.post, path, report.body, report.key)
            except TemporaryError as error:
                self._log.report("outcome", f"an outcome is not reported yet: {error}")
                return
            except RefusedError as refusal:
                text = f"outcome of recommendation {report.recommendation_id} not reported: {refusal}"
                self._log.report(f"outcome {refusal.status}", text)
            self._outcomes.popleft()

    def _on_retry(self, error: BaseException) -> None:
        _logger.debug("recommendations: %s", error)
