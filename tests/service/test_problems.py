"""Errors that no endpoint decides: routing, media types, sizes, failures, health."""

from __future__ import annotations

import json
import socket
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from pitstop_service.app import create_app
from pitstop_service.settings import Settings

from . import documents
from .conftest import NewDatabase
from .server import Service, problem, running

JSON = {"Content-Type": "application/json"}
LIMIT = 8 * 1024**2


def test_not_found(service: Service) -> None:
    assert problem(service.client.get("/v1/nothing"), 404)["type"] == "urn:pitstop:problem:not-found"


def test_method_not_allowed(service: Service) -> None:
    answer = service.client.delete("/v1/runs")
    assert problem(answer, 405)["type"] == "urn:pitstop:problem:method-not-allowed"
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "text/json", "nonsense"]
)
def test_unsupported_media_type(service: Service, media_type: str) -> None:
    """Above all form and text: a page of a foreign site may send those to a loopback address without asking."""
    before = service.counts()
    body = json.dumps(documents.manifest())
    answer = service.client.post("/v1/runs", content=body, headers={"Content-Type": media_type})
    document = problem(answer, 415)
    assert document["errors"][0]["field"] == "Content-Type"
    assert media_type in document["errors"][0]["value"]
    assert answer.headers["accept"] == "application/json"
    assert service.counts() == before


def test_no_media_type(service: Service) -> None:
    problem(service.client.post("/v1/runs", content=json.dumps(documents.manifest())), 415)


def test_compressed_body(service: Service) -> None:
    answer = service.client.post(
        "/v1/runs", content=b"\x1f\x8b", headers={**JSON, "Content-Encoding": "gzip"}
    )
    assert problem(answer, 415)["errors"][0]["value"] == "'gzip'"


def test_media_type_with_a_parameter(service: Service) -> None:
    body = json.dumps(documents.manifest())
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert service.client.post("/v1/runs", content=body, headers=headers).status_code == 201


def test_no_body(service: Service) -> None:
    assert problem(service.client.post("/v1/runs", headers=JSON), 422)["errors"]


@pytest.mark.parametrize("chunked", [False, True])
def test_oversized_body(service: Service, chunked: bool) -> None:
    before = service.counts()
    body = b"[" * (LIMIT + 1)  # not JSON either: 413 shows that nothing parsed it
    content: Any = (body[i : i + 65_536] for i in range(0, len(body), 65_536)) if chunked else body
    document = problem(service.client.post("/v1/runs", content=content, headers=JSON), 413)
    assert document["errors"][0]["field"] == "(body)"
    assert str(LIMIT) in document["errors"][0]["problem"]
    assert service.counts() == before


def test_announced_size_is_refused_before_the_body_comes(service: Service) -> None:
    url = service.client.base_url
    head = (
        "POST /v1/runs HTTP/1.1\r\nHost: pitstop\r\n"
        "Content-Type: application/json\r\nContent-Length: 100000000000\r\n\r\n"
    )
    with socket.create_connection((url.host, url.port or 0), timeout=20) as connection:
        connection.sendall(head.encode())  # and not one byte of body
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == 413
        assert json.loads(answer.read())["errors"][0]["value"] == "100000000000 bytes"
        answer.close()


def test_a_body_of_the_largest_size_is_read(service: Service) -> None:
    body = json.dumps(documents.manifest()).encode()
    answer = service.client.post("/v1/runs", content=body + b" " * (LIMIT - len(body)), headers=JSON)
    assert answer.status_code == 201


def test_internal_error_hides_its_cause(sqlite_url: str) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("password=hunter2")

    with running(create_app(Settings(database_url=sqlite_url), predictor=broken)) as service:
        before = service.counts()
        document = problem(service.client.post("/v1/predictions", json=documents.request()), 500)
        assert service.counts() == before
    assert document["type"] == "urn:pitstop:problem:internal"
    assert "hunter2" not in json.dumps(document)


def test_nan_in_a_prediction_is_a_failure_and_not_stored(sqlite_url: str) -> None:
    from pitstop.prediction import Prediction
    from pitstop_service.predictions.predictor import simulate

    def broken(*args: Any, **given: Any) -> Prediction:
        good = simulate(*args, **given)
        plan = good.plans[0]
        bad = plan.model_copy(update={"switch_s": plan.switch_s.model_copy(update={"mean": float("nan")})})
        return good.model_copy(update={"plans": [bad]})

    with running(create_app(Settings(database_url=sqlite_url), predictor=broken)) as service:
        before = service.counts()
        problem(service.client.post("/v1/predictions", json=documents.request()), 500)
        assert service.counts() == before


def test_health(service: Service) -> None:
    assert service.client.get("/healthz/live").json() == {"status": "ok"}
    assert service.client.get("/healthz/ready").json() == {"status": "ok", "revision": "0001"}


def test_not_ready_without_schema(empty_database: NewDatabase) -> None:
    with running(create_app(Settings(database_url=empty_database()))) as service:
        assert service.client.get("/healthz/live").status_code == 200
        document = problem(service.client.get("/healthz/ready"), 503)
    assert "pitstop db upgrade" in document["detail"]


def test_database_that_cannot_be_reached(tmp_path: Path) -> None:
    url = f"postgresql+psycopg://nobody@/none?host={tmp_path}"
    with running(create_app(Settings(database_url=url))) as service:
        assert service.client.get("/healthz/live").status_code == 200
        problem(service.client.get("/healthz/ready"), 503)
        answer = service.client.post("/v1/runs", json=documents.manifest())
        document = problem(answer, 503)
    assert document["type"] == "urn:pitstop:problem:unavailable"
    assert answer.headers["retry-after"] == "5"
    assert str(tmp_path) not in json.dumps(document)
