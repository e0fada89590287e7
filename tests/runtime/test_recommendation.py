"""The recommendation client: the newest valid answer, at once, and no harm from any other."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from telemetry_records import IMPATIENT, SCENARIO, manifest, step
from telemetry_servers import (
    FakeServer,
    Reply,
    Request,
    nobody,
    real_service,
    wait_until,
)

from pitstop.errors import InvalidInputError
from pitstop.plan import NAMED_PLANS
from pitstop_runtime.recommendation import Outcome, Recommendation, RecommendationClient
from pitstop_runtime.telemetry import TelemetryClient

pytestmark = pytest.mark.usefixtures("cheap_clients")


NONE = Reply(404, {"title": "Not found"})


def document(**changes: Any) -> dict[str, Any]:
    later = datetime.now(UTC) + timedelta(hours=1)
    plan = NAMED_PLANS["lean"].model_dump(mode="json")
    return {"id": "r-1", "plan": plan, "expires_at": later.isoformat(), "reason": "cheaper", **changes}


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    server.answer = lambda _: NONE
    yield server
    server.close()


Start = Callable[..., RecommendationClient]


@pytest.fixture
def start(fake: FakeServer) -> Iterator[Start]:
    made: list[RecommendationClient] = []

    def make(url: str | None = fake.url, **options: Any) -> RecommendationClient:
        given = {"poll_s": 0.01, "backoff": IMPATIENT.backoff, **options}
        made.append(RecommendationClient(url, SCENARIO, **given))
        return made[-1]

    yield make
    for client in made:
        client.close(0)


def polls(fake: FakeServer) -> list[Request]:
    return [request for request in fake.requests if request.method == "GET"]


def more_polls(fake: FakeServer, number: int = 3) -> None:
    """Wait until a poll that began after now is over."""
    enough = len(polls(fake)) + number
    wait_until(lambda: len(polls(fake)) >= enough)


def test_the_newest_recommendation_is_held(fake: FakeServer, start: Start) -> None:
    client = start()
    more_polls(fake)
    assert client.current() is None
    fake.answer = lambda _: Reply(200, document())
    wait_until(client.current)
    held = client.current()
    assert held == Recommendation.model_validate(document(expires_at=held.expires_at if held else None))
    fake.answer = lambda _: Reply(200, document(id="r-2"))
    wait_until(lambda: (found := client.current()) and found.id == "r-2")
    fake.answer = lambda _: NONE
    wait_until(lambda: client.current() is None)


def test_an_unchanged_one_is_not_sent_again(fake: FakeServer, start: Start) -> None:
    def answer(request: Request) -> Reply:
        if request.headers.get("if-none-match") == '"v1"':
            return Reply(304)
        return Reply(200, document(), {"ETag": '"v1"'})

    fake.answer = answer
    client = start()
    more_polls(fake)
    assert client.current() is not None
    assert [request.headers.get("if-none-match") for request in polls(fake)[:3]] == [None, '"v1"', '"v1"']


def test_an_expired_one_is_not_returned(fake: FakeServer, start: Start) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    fake.answer = lambda _: Reply(200, document(expires_at=before.isoformat()))
    client = start()
    more_polls(fake)
    assert client.current() is None


NONSENSE: dict[str, Reply | None] = {
    "500": Reply(500),
    "an HTML page": Reply(200, b"<html>"),
    "an empty object": Reply(200, {}),
    "an unusable plan": Reply(200, document(plan={"name": "unknown"})),
    "a time without a zone": Reply(200, document(expires_at="2026-01-15T08:30:00")),
    "403": Reply(403, {"detail": "no"}),
    "no answer": None,
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_an_answer_that_makes_no_sense_changes_nothing(nonsense: str, fake: FakeServer, start: Start) -> None:
    fake.answer = lambda _: Reply(200, document())
    client = start()
    wait_until(client.current)
    fake.answer = lambda _: NONSENSE[nonsense]
    more_polls(fake)
    assert client.current() is not None


def test_an_unreachable_service_means_none(start: Start) -> None:
    with nobody() as address:
        client = start(address)
        client.report("r-1", Outcome.APPLIED)
        assert client.current() is None
        assert client.close(0.1) == 1


def test_outcomes_are_reported_in_order_whatever_it_takes(fake: FakeServer, start: Start) -> None:
    failures = iter([Reply(503), None, Reply(200, b"<html>")])

    def answer(request: Request) -> Reply | None:
        return NONE if request.method == "GET" else next(failures, Reply(200, {}))

    fake.answer = answer
    client = start(poll_s=300)
    client.report("a/b", "applied", "x" * 5000)
    client.report("r-2", Outcome.REFUSED)
    client.report("r-3", "failed", "canary")
    assert client.close(20) == 0
    posts = [request for request in fake.requests if request.method == "POST"]
    paths = list(dict.fromkeys(request.path for request in posts))
    assert paths == [f"/v1/recommendations/{name}/outcomes" for name in ("a%2Fb", "r-2", "r-3")]
    assert json.loads(posts[0].body) == {"outcome": "applied", "detail": "x" * 2000}
    assert json.loads(posts[-1].body) == {"outcome": "failed", "detail": "canary"}
    assert len({request.headers["idempotency-key"] for request in posts}) == 3


def test_an_outcome_that_the_service_refuses_does_not_hold_up_the_next(
    fake: FakeServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    fake.answer = lambda request: Reply(200, {}) if "r-2" in request.path else NONE
    client = start(poll_s=300)
    client.report("r-1", "applied")
    client.report("r-2", "applied")
    assert client.close(20) == 0
    assert "outcome of recommendation r-1 not reported: HTTP 404" in caplog.text


def test_reporting_nonsense_does_not_raise(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    client = start()
    client.report("r-1", "shrugged")
    client.report("r-1", "applied", None)  # type: ignore[arg-type]
    assert caplog.text.count("not reported") == 2
    client.close(20)
    client.report("r-1", "applied")
    assert "dropped" in caplog.text


def test_outcomes_are_bounded(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with nobody() as address:
        client = start(address, poll_s=300)
        for number in range(70):
            client.report(f"r-{number}", "applied")
        assert client.close(0) == 64
    assert caplog.text.count("dropped") == 6
    assert "64 outcomes of recommendations could not be reported" in caplog.text


def test_off(start: Start) -> None:
    before = threading.active_count()
    client = start(None)
    assert threading.active_count() == before
    client.report("r-1", "applied")
    assert client.current() is None
    assert client.close() == 0
    with pytest.raises(InvalidInputError):
        start("nowhere")


def test_the_digest_is_the_one_that_the_service_keeps(fake: FakeServer, start: Start, tmp_path: Path) -> None:
    start()
    wait_until(lambda: polls(fake))
    asked = urlsplit(polls(fake)[0].path)
    assert asked.path == "/v1/recommendations/current"
    with real_service(tmp_path) as service:
        with TelemetryClient(manifest(), service.url, None, options=IMPATIENT) as client:
            client.submit(step(1))
        (run,) = service.runs()
        assert parse_qs(asked.query) == {"scenario_digest": [service.scenario_digest(run)]}
