"""The client against servers that misbehave: temporary trouble is retried, nothing is lost over the rest."""

from __future__ import annotations

import json
import logging
import math
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from telemetry_records import IMPATIENT, manifest, step
from telemetry_servers import (
    RUN_ID,
    Answer,
    FakeServer,
    Reply,
    Request,
    script,
    wait_until,
    well_behaved,
)

from pitstop_runtime.telemetry import Backoff, DropReason, TelemetryClient
from pitstop_runtime.telemetry.folder import REFUSED
from pitstop_runtime.telemetry.refusals import judge
from pitstop_runtime.telemetry.retry import Patience
from pitstop_runtime.telemetry.stats import QuietLog
from pitstop_runtime.telemetry.transport import (
    LONGEST_RETRY_AFTER_S,
    Connection,
    RefusedError,
    TemporaryError,
    idempotency_key,
)

pytestmark = [pytest.mark.fault, pytest.mark.usefixtures("cheap_clients")]


PROBLEM = {"Content-Type": "application/problem+json"}
KEY = uuid.UUID(int=1)


@pytest.fixture
def connection(fake: FakeServer) -> Iterator[Connection]:
    made = Connection(fake.url, token="secret", timeout_s=5)
    yield made
    made.close()


Start = Callable[..., TelemetryClient]


@pytest.fixture
def start(fake: FakeServer, tmp_path: Path) -> Iterator[Start]:
    """A client of the fake server with some records, all of them in the spool as one batch."""
    made: list[TelemetryClient] = []

    def make(*numbers: int, **options: object) -> TelemetryClient:
        given: dict[str, Any] = {"options": IMPATIENT, **options}
        with TelemetryClient(manifest(), None, tmp_path, options=given["options"]) as earlier:
            for number in numbers:
                earlier.submit(step(number))
        made.append(TelemetryClient(manifest(), fake.url, tmp_path, **given))
        return made[-1]

    yield make
    for client in made:
        client.close(0)


def refused_steps(spool_dir: Path) -> list[int]:
    (path,) = spool_dir.glob(f"*/{REFUSED}")
    return [json.loads(line)["record"]["step"] for line in path.read_text().splitlines()]


def acknowledged(fake: FakeServer) -> list[int]:
    """Steps of the last request."""
    return fake.batches()[-1].steps


TEMPORARY: dict[str, Reply | None] = {
    "500": Reply(500),
    "503 with a problem document": Reply(503, {"title": "Busy"}, PROBLEM),
    "408": Reply(408),
    "425": Reply(425),
    "429": Reply(429, {}, {"Retry-After": "0"}),
    "no answer": None,
    "an HTML page": Reply(200, b"<html>Log in</html>"),
    "an empty page": Reply(200),
    "not UTF-8": Reply(200, b"\xff{}"),
    "another JSON value": Reply(200, b"[]", {"Content-Type": "application/json"}),
    "an object that says nothing": Reply(200, {}),
    "numbers that do not add up": Reply(200, {"stored": 1, "duplicates": 0, "id": "no id"}),
    "endless": Reply(200, b" " * (1024**2 + 1)),
    "broken compression": Reply(200, b"no gzip", {"Content-Encoding": "gzip"}),
}


@pytest.mark.parametrize("trouble", TEMPORARY)
def test_temporary_trouble_is_retried(trouble: str, fake: FakeServer, start: Start) -> None:
    """When registering, and when sending."""
    fake.answer = script(TEMPORARY[trouble], well_behaved, TEMPORARY[trouble], TEMPORARY[trouble])
    client = start(1, 2, 3)
    assert client.close(20) == 0
    stats = client.stats()
    assert (stats.sent, stats.retries, stats.dropped) == (3, 3, {})
    assert stats.last_error is not None
    assert [request.path for request in fake.requests] == ["/v1/runs"] * 2 + [f"/v1/runs/{RUN_ID}/steps"] * 3
    first, *again = fake.batches()
    assert {(r.body, r.headers["idempotency-key"]) for r in again} == {
        (first.body, first.headers["idempotency-key"])
    }


def test_a_slow_answer_is_given_up_and_the_batch_sent_again(fake: FakeServer, start: Start) -> None:
    done = threading.Event()

    def hang(_: Request) -> None:
        done.wait(20)

    fake.answer = script(well_behaved, hang)
    client = start(1, timeout_s=0.1)
    wait_until(lambda: client.stats().sent == 1)
    assert client.stats().retries >= 1
    done.set()


def test_an_answer_that_dribbles_is_given_up(fake: FakeServer) -> None:
    connection = Connection(fake.url, timeout_s=0.2)
    fake.answer = script(Reply(200, b" " * 50, dribble=True))
    with pytest.raises(TemporaryError, match=r"took too long|timed out"):
        connection.post("/v1/runs", b"{}", KEY)
    connection.close()


def test_closing_does_not_wait_for_a_slow_service(fake: FakeServer, start: Start) -> None:
    done = threading.Event()

    def hang(_: Request) -> None:
        done.wait(20)

    fake.answer = hang
    client = start(1)
    wait_until(lambda: fake.requests)
    assert client.close(0.05) == 1
    done.set()


NOW = datetime.now(UTC)
RETRY_AFTER: dict[str, tuple[str, float]] = {
    "none": ("", 0),
    "zero": ("0", 0),
    "seconds": ("7", 7),
    "far too long": ("999999999999999999", LONGEST_RETRY_AFTER_S),
    "a date to come": (format_datetime(NOW + timedelta(hours=1), usegmt=True), LONGEST_RETRY_AFTER_S),
    "a date gone by": (format_datetime(NOW - timedelta(hours=1), usegmt=True), 0),
    "negative": ("-3", 0),
    "a word": ("soon", 0),
}


@pytest.mark.parametrize("case", RETRY_AFTER)
def test_retry_after(case: str, fake: FakeServer, connection: Connection) -> None:
    given, seconds = RETRY_AFTER[case]
    fake.answer = script(Reply(429, {}, {"Retry-After": given}))
    with pytest.raises(TemporaryError) as caught:
        connection.post("/v1/runs", b"{}", KEY)
    assert caught.value.retry_after_s == seconds


class NoWait(Patience):
    """Notes how long it should have slept."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def test_waits_grow_are_random_and_respect_retry_after() -> None:
    patience, errors = NoWait(), []
    backoff = Backoff(first_s=1.0, longest_s=16.0)

    def fail(retry_after_s: float) -> None:
        raise TemporaryError("busy", retry_after_s)

    with pytest.raises(TemporaryError):
        backoff.retrying(patience, errors.append, attempts=200)(fail, 0.0)
    assert len(patience.slept) == len(errors) == 199
    limits = [min(2.0**n, 16.0) for n in range(199)]
    assert all(0 <= slept <= limit for slept, limit in zip(patience.slept, limits, strict=True))
    assert max(patience.slept) > 8
    assert min(patience.slept[10:]) < 4
    patience.slept.clear()
    with pytest.raises(TemporaryError):
        backoff.retrying(patience, errors.append, attempts=3)(fail, 30.0)
    assert patience.slept == [30.0, 30.0]


def test_closing_ends_the_attempts_when_the_next_would_come_too_late() -> None:
    patience, calls = NoWait(), 0
    patience.close_within(20)

    def fail() -> None:
        nonlocal calls
        calls += 1
        raise TemporaryError("busy", 300.0)

    with pytest.raises(TemporaryError):
        Backoff().retrying(patience, lambda _: None)(fail)
    assert (calls, patience.slept) == (1, [])


def test_closing_wakes_a_sleeper() -> None:
    patience = Patience()
    sleeper = threading.Thread(target=patience.sleep, args=(300,))
    sleeper.start()
    assert patience.remaining() == math.inf
    patience.close_within(300)
    sleeper.join(20)
    assert not sleeper.is_alive()


def picky(status: int, bad: set[int], document: Callable[[list[int]], Reply]) -> Answer:
    """Refuses batches that hold bad steps."""

    def answer(request: Request) -> Reply:
        if request.path == "/v1/runs" or not bad & set(request.steps):
            return well_behaved(request)
        assert document(request.steps).status == status
        return document(request.steps)

    return answer


@pytest.mark.parametrize("status", [400, 409, 413, 422])
def test_a_batch_refused_without_a_hint_is_halved(
    status: int, fake: FakeServer, start: Start, tmp_path: Path
) -> None:
    bad = {3, 17, 18, 40}
    fake.answer = picky(status, bad, lambda _: Reply(status, {"detail": "no"}, PROBLEM))
    client = start(*range(50))
    assert client.close(20) == 0
    assert client.stats().dropped == {DropReason.REFUSED: 4}
    assert client.stats().sent == 46
    assert set(refused_steps(tmp_path)) == bad
    assert len(fake.batches()) < 50


@pytest.mark.parametrize("field", ["steps.{}", "steps.{}.phases.sleep.total_s"])
def test_a_hint_saves_the_halving(field: str, fake: FakeServer, start: Start, tmp_path: Path) -> None:
    def document(steps: list[int]) -> Reply:
        at = [field.format(index) for index, number in enumerate(steps) if number in (3, 17)]
        errors = [{"field": name, "value": "-1", "problem": "too small", "remedy": "x"} for name in at]
        return Reply(422, {"detail": "2 problems", "errors": errors}, PROBLEM)

    fake.answer = picky(422, {3, 17}, document)
    assert start(*range(50)).close(20) == 0
    assert refused_steps(tmp_path) == [3, 17]
    assert len(fake.batches()) == 2


@pytest.mark.parametrize(
    "document",
    [
        {"errors": [{"field": "steps.99.step"}, {"field": 3}, {"field": "stepsies.1"}, 7, {}]},
        {"errors": "all of them"},
        {"errors": [{"field": "(body)"}], "steps": "all", "detail": ["x"]},
        {"steps": [99, "1", None, [1], True]},
    ],
)
def test_a_hint_that_leads_nowhere_is_ignored(document: dict[str, object]) -> None:
    batch = [json.dumps({"step": number}).encode() for number in range(10, 14)]
    verdict = judge(batch, RefusedError(409, document))
    assert verdict.refused == []
    assert verdict.again == [batch[:2], batch[2:]]
    assert judge(batch[:1], RefusedError(409, document)).again == []


def test_of_two_records_with_one_number_the_first_is_sent_again() -> None:
    batch = [json.dumps({"step": number, "n": n}).encode() for n, number in enumerate([1, 2, 1, 3])]
    verdict = judge(batch, RefusedError(409, {"steps": [1, 3]}))
    assert [record for record, _ in verdict.refused] == batch[2:]
    assert verdict.again == [batch[:2]]


@pytest.mark.parametrize(
    "reply",
    [
        Reply(401, {"detail": "who are you?"}, PROBLEM),
        Reply(403, b"<html>"),
        Reply(404, b"<html>nothing here</html>"),
        Reply(422, b"<html>a firewall</html>"),
        Reply(302, b"", {"Location": "https://elsewhere/"}),
    ],
)
def test_a_service_that_refuses_to_deal_with_us_gets_the_records_later(
    reply: Reply, fake: FakeServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Here not even the run's id may be forgotten: the trouble is not the run's."""
    fake.answer = script(well_behaved, reply, reply)
    client = start(1, 2, 3)
    wait_until(lambda: client.stats().sent == 3)
    assert client.stats().dropped == {}
    assert "Check the address, the token and the manifest" in caplog.text
    assert len([request for request in fake.requests if request.path == "/v1/runs"]) == 1


def test_closing_while_the_service_refuses_to_deal_with_us(fake: FakeServer, start: Start) -> None:
    fake.answer = lambda _: Reply(401, {"detail": "who are you?"}, PROBLEM)
    client = start(1, 2, 3, options=replace(IMPATIENT, refused_pause_s=300))
    wait_until(lambda: client.stats().last_error)
    assert client.close(300) == 3
    assert "HTTP 401: 'who are you?'" in str(client.stats().last_error)


def leave_records(spool_dir: Path, name: str, url: str | None) -> None:
    """What a crashed process of another run leaves."""
    with TelemetryClient(manifest(name), url, spool_dir, options=IMPATIENT) as earlier:
        earlier.submit(step(1))
        wait_until(lambda: earlier.stats().spooled == 1)
        if url is not None:
            wait_until(lambda: earlier.stats().retries)
        earlier.close(0.05)
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("pitstop")])


def test_what_runs_of_another_service_left_stays(fake: FakeServer, start: Start, tmp_path: Path) -> None:
    other = FakeServer()
    other.answer = script(well_behaved, *[Reply(500)] * 1000)
    leave_records(tmp_path, "other", other.url)
    other.close()
    leave_records(tmp_path, "never registered", None)
    client = start()
    wait_until(lambda: client.stats().sent == 1)
    assert client.close(20) == 0
    assert (client.stats().recovered, len(fake.batches())) == (1, 1)
    assert len(list(tmp_path.glob("*/steps-*.jsonl"))) == 1


@pytest.mark.parametrize("trouble", [Reply(500), Reply(401, {}), Reply(422, {})], ids=["500", "401", "422"])
def test_what_other_runs_left_does_not_hold_up_this_one(
    trouble: Reply, fake: FakeServer, start: Start, tmp_path: Path
) -> None:
    """It is tried once, and stays."""
    leave_records(tmp_path, "earlier", None)
    fake.answer = lambda r: trouble if b"earlier" in r.body else well_behaved(r)
    client = start()
    wait_until(lambda: "an earlier run" in str(client.stats().last_error))
    client.submit(step(2))
    assert client.close(20) == 0
    assert (client.stats().sent, client.stats().recovered) == (1, 0)
    assert len(list(tmp_path.glob("*/steps-*.jsonl"))) == 1


def test_records_in_quick_succession_share_a_request(fake: FakeServer, start: Start) -> None:
    client = start(1, options=replace(IMPATIENT, every_s=300.0, batch_size=5))
    wait_until(lambda: client.stats().sent == 1)
    for number in range(2, 5):
        client.submit(step(number))
    wait_until(lambda: client.stats().spooled == 3)
    assert client.close(300) == 0
    assert [request.steps for request in fake.batches()] == [[1], [2, 3, 4]]


def test_full_batches_do_not_wait(fake: FakeServer, start: Start) -> None:
    client = start(*range(20), options=replace(IMPATIENT, every_s=300.0, batch_size=5))
    wait_until(lambda: client.stats().sent == 20)
    assert [len(request.steps) for request in fake.batches()] == [5] * 4


def test_a_run_lost_between_the_parts_of_a_batch_gets_all_of_it(fake: FakeServer, start: Start) -> None:
    """What the lost run had acknowledged of this batch goes to the new one."""
    new = "99999999-2222-4333-8444-555555555555"
    seen: list[list[int]] = []

    def answer(request: Request) -> Reply:
        if request.path == "/v1/runs":
            return Reply(201, {"id": new if seen else RUN_ID})
        if RUN_ID in request.path and len(seen) == 2:
            return Reply(404, {"detail": "no such run"}, PROBLEM)
        seen.append(request.steps)
        return Reply(413) if len(seen) == 1 else well_behaved(request)

    fake.answer = answer
    assert start(1, 2, 3, 4).close(20) == 0
    assert [1, 2, 3, 4] in seen[1:]
    keys = [r.headers["idempotency-key"] for r in fake.requests if r.path == "/v1/runs"]
    assert len(set(keys)) == 2


def test_the_key_depends_on_content_and_sender_only() -> None:
    other = uuid.UUID(int=2)
    assert idempotency_key(KEY, b"a", b"b") == idempotency_key(KEY, b"a", b"b")
    assert (
        len({idempotency_key(*given) for given in [(KEY, b"a", b"b"), (KEY, b"ab"), (other, b"a", b"b")]})
        == 3
    )


def test_requests_carry_what_the_service_needs(fake: FakeServer, connection: Connection) -> None:
    connection.post("/v1/runs", b'{"a":1}', KEY)
    (request,) = fake.requests
    assert request.body == b'{"a":1}'
    assert request.headers["content-type"] == "application/json"
    assert request.headers["authorization"] == "Bearer secret"
    assert request.headers["idempotency-key"] == str(KEY)
    assert request.headers["user-agent"].startswith("pitstop/")


def test_an_address_with_a_password_is_not_shown() -> None:
    connection = Connection("http://user:password@127.0.0.1:9/base")
    assert connection.name == "http://127.0.0.1:9/base"
    connection.close()


def test_equal_warnings_are_held_back_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = QuietLog(logging.getLogger("quiet"), every_s=60, clock=lambda: now)
    for _ in range(3):
        log.report("a", "first")
    log.report("b", "second")
    now = 61.0
    log.report("a", "third")
    assert caplog.messages == ["first", "second", "third (2 warnings like this were held back)"]
