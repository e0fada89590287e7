"""Runs and steps over HTTP: atomic batches, safe repetition, summaries, pages."""

from __future__ import annotations

import random
import statistics
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from . import documents
from .server import Service, problem


def _send(service: Service, run_id: str, *steps: dict[str, Any]) -> Any:
    return service.client.post(f"/v1/runs/{run_id}/steps", json={"steps": list(steps)})


def test_create_and_get_a_run(service: Service) -> None:
    answer = service.client.post("/v1/runs", json=documents.manifest(started_at="2026-01-15T10:30:00+02:00"))
    assert answer.status_code == 201
    created = answer.json()
    assert answer.headers["location"] == f"/v1/runs/{created['id']}"
    run = service.client.get(answer.headers["location"]).json()
    assert run["created_at"] == created["created_at"]
    assert run["manifest"]["plan"]["name"] == "reload"
    assert run["manifest"]["arm"] == "baseline"
    assert run["step_count"] == 0
    assert run["summary"]["steady_steps"] == 0
    assert run["summary"]["phases"]["sleep"] == {"n": 0, "mean_s": None, "sd_s": None}


def test_summary_leaves_the_leading_steps_out(service: Service, run_id: str) -> None:
    """The leading steps by number, whatever their order of arrival and wherever the numbers start."""
    rng = random.Random(3)
    seconds = {number: 1e4 + rng.uniform(-1e-3, 1e-3) for number in range(100, 140)}
    steps = [documents.step(number, value) for number, value in seconds.items()]
    rng.shuffle(steps)
    assert _send(service, run_id, *steps[:25]).json() == {"stored": 25, "duplicates": 0}
    assert _send(service, run_id, *steps[25:]).json() == {"stored": 15, "duplicates": 0}
    run = service.client.get(f"/v1/runs/{run_id}").json()
    steady = [seconds[number] for number in sorted(seconds)[1:]]
    summary = run["summary"]["phases"]["sleep"]
    assert run["step_count"] == 40
    assert run["summary"]["steady_steps"] == summary["n"] == 39
    assert summary["mean_s"] == pytest.approx(statistics.mean(steady), rel=1e-12)
    assert summary["sd_s"] == pytest.approx(statistics.stdev(steady), rel=1e-6)
    assert run["summary"]["phases"]["wake_up"] == {"n": 39, "mean_s": 4.0, "sd_s": 0.0}


def test_a_phase_that_was_not_measured_does_not_count(service: Service, run_id: str) -> None:
    only_sleep = {"step": 2, "phases": {"sleep": {"total_s": 6.0}}}
    _send(service, run_id, documents.step(0), documents.step(1), only_sleep).raise_for_status()
    phases = service.client.get(f"/v1/runs/{run_id}").json()["summary"]["phases"]
    assert phases["sleep"]["n"] == 2
    assert phases["sleep"]["mean_s"] == 7.0
    assert phases["wake_up"] == {"n": 1, "mean_s": 4.0, "sd_s": None}


def test_sending_again_is_safe(service: Service, run_id: str) -> None:
    first = [documents.step(0), documents.step(1)]
    assert _send(service, run_id, *first).json() == {"stored": 2, "duplicates": 0}
    assert _send(service, run_id, *first, documents.step(2)).json() == {"stored": 1, "duplicates": 2}
    assert _send(service, run_id, documents.step(3), documents.step(3)).json() == {
        "stored": 1,
        "duplicates": 1,
    }
    assert service.client.get(f"/v1/runs/{run_id}").json()["step_count"] == 4


def test_same_content_in_another_spelling_is_a_duplicate(service: Service, run_id: str) -> None:
    _send(service, run_id, documents.step(0, 8.0)).raise_for_status()
    spelled = documents.step(0, 8, schema_version=1, step_s=None, recorded_at="2026-01-15T08:33:10+00:00")
    assert _send(service, run_id, spelled).json() == {"stored": 0, "duplicates": 1}


def test_different_content_is_refused_and_nothing_stored(service: Service, run_id: str) -> None:
    _send(service, run_id, documents.step(0), documents.step(1)).raise_for_status()
    before = service.counts()
    changed = [
        documents.step(0, 9.0),
        documents.step(1, 9.0),
        documents.step(5),
        documents.step(5, 9.0),
        documents.step(6),
    ]
    document = problem(_send(service, run_id, *changed), 409)
    assert document["steps"] == [0, 1, 5]
    assert [item["value"] for item in document["errors"]] == ["0", "1", "5"]
    assert service.counts() == before
    page = service.client.get(f"/v1/runs/{run_id}/steps").json()
    assert [step["phases"]["sleep"]["total_s"] for step in page["steps"]] == [8.0, 8.0]


def test_one_bad_step_stores_nothing(service: Service, run_id: str) -> None:
    before = service.counts()
    batch = [documents.step(n) for n in range(50)]
    batch[37] = documents.step(37, -1.0)
    document = problem(_send(service, run_id, *batch), 422)
    assert document["errors"][0]["field"] == "steps.37.phases.sleep.total_s"
    assert document["errors"][0]["value"] == "-1.0"
    assert service.counts() == before


def test_a_failure_in_the_middle_of_storing_stores_nothing(
    service: Service, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pitstop_service.runs.repository import RunRepository

    real = RunRepository.add_steps

    def half(self: RunRepository, rows: Any) -> None:
        real(self, rows[:5])
        raise RuntimeError("disk on fire")

    before = service.counts()
    with monkeypatch.context() as patch:
        patch.setattr(RunRepository, "add_steps", half)
        document = problem(_send(service, run_id, *[documents.step(n) for n in range(10)]), 500)
    assert "fire" not in str(document)
    assert service.counts() == before
    assert _send(service, run_id, *[documents.step(n) for n in range(10)]).json()["stored"] == 10


def test_batch_limits(service: Service, run_id: str) -> None:
    before = service.counts()["steps"]
    small = [{"step": n, "phases": {"sleep": {"total_s": 1.5}}} for n in range(10_001)]
    assert problem(_send(service, run_id), 422)["errors"][0]["field"] == "steps"
    assert problem(_send(service, run_id, *small), 422)["errors"][0]["field"] == "steps"
    assert service.counts()["steps"] == before
    assert _send(service, run_id, *small[:10_000]).json() == {"stored": 10_000, "duplicates": 0}
    assert _send(service, run_id, *small[9_000:]).json() == {"stored": 1, "duplicates": 1_000}


def test_largest_step_number(service: Service, run_id: str) -> None:
    assert _send(service, run_id, documents.step(2**53)).json()["stored"] == 1
    page = service.client.get(f"/v1/runs/{run_id}/steps").json()
    assert page["steps"][0]["step"] == 2**53


def test_pages(service: Service, run_id: str) -> None:
    numbers = [*range(0, 30, 3), 1000, 1001, 5000]
    _send(service, run_id, *[documents.step(n) for n in reversed(numbers)]).raise_for_status()
    seen, after = [], -1
    for _ in range(10):
        page = service.client.get(f"/v1/runs/{run_id}/steps", params={"after": after, "limit": 4}).json()
        assert len(page["steps"]) <= 4
        seen += [step["step"] for step in page["steps"]]
        if page["next_after"] is None:
            break
        after = page["next_after"]
    assert seen == numbers
    exact = service.client.get(f"/v1/runs/{run_id}/steps", params={"limit": 13}).json()
    assert exact["next_after"] is None
    assert len(exact["steps"]) == 13
    too_many = problem(service.client.get(f"/v1/runs/{run_id}/steps", params={"limit": 1001}), 422)
    assert too_many["errors"][0]["field"] == "query.limit"


def test_steps_come_back_as_they_were_sent(service: Service, run_id: str) -> None:
    sent = documents.step(4, 0.1 + 0.2, slowest_rank=3, step_s=1e-7)
    _send(service, run_id, sent).raise_for_status()
    got = service.client.get(f"/v1/runs/{run_id}/steps").json()["steps"][0]
    measured = {name: value for name, value in got["phases"]["sleep"].items() if value}
    assert measured == {"total_s": 0.1 + 0.2, "components_s": {"saver.pause": 3.5}}
    assert (got["step_s"], got["slowest_rank"], got["recorded_at"]) == (1e-7, 3, "2026-01-15T08:33:10Z")


def test_unknown_run(service: Service) -> None:
    missing = uuid.uuid4()
    before = service.counts()
    problem(service.client.get(f"/v1/runs/{missing}"), 404)
    problem(service.client.get(f"/v1/runs/{missing}/steps"), 404)
    document = problem(_send(service, str(missing), documents.step(0)), 404)
    assert str(missing) in document["detail"]
    assert service.counts() == before


def test_concurrent_batches_of_one_run(service: Service, run_id: str) -> None:
    """Eight trainers' ranks send overlapping batches at once: each step is stored once, nobody fails."""
    batches = [[documents.step(n) for n in range(start, start + 40)] for start in range(0, 160, 20)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda batch: _send(service, run_id, *batch), batches))
    assert [answer.status_code for answer in answers] == [200] * 8, [a.text for a in answers]
    assert sum(answer.json()["stored"] for answer in answers) == 180
    assert sum(answer.json()["duplicates"] for answer in answers) == 8 * 40 - 180
    assert service.client.get(f"/v1/runs/{run_id}").json()["step_count"] == 180
