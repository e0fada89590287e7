"""Predictions over HTTP: the same numbers as everywhere else, stored and found again."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pitstop.errors import UnsupportedScenarioError
from pitstop.loading import load_scenario
from pitstop.plan import named_plan
from pitstop.units import GIB
from pitstop_service.app import create_app
from pitstop_service.settings import Settings
from pitstop_simulator.predict import predict
from pitstop_simulator.site import parse_site_evidence

from . import documents
from .server import Service, problem, running


def test_create_and_get(service: Service) -> None:
    before = service.counts()["predictions"]
    answer = service.client.post("/v1/predictions", json=documents.request(budget_bytes=2 * GIB))
    assert answer.status_code == 201
    created = answer.json()
    assert answer.headers["location"] == f"/v1/predictions/{created['id']}"
    assert str(uuid.UUID(created["id"])) == created["id"]
    assert created["created_at"].endswith("Z")
    assert [plan["plan"] for plan in created["prediction"]["plans"]] == ["reload", "lean"]
    assert created["prediction"]["budget_bytes"] == 2 * GIB
    found = service.client.get(answer.headers["location"])
    assert found.status_code == 200
    assert found.json() == created
    assert service.counts()["predictions"] == before + 1


@pytest.mark.parametrize("with_site", [False, True])
def test_rest_python_and_command_line_agree(
    service: Service, backend: str, repository_root: Path, with_site: bool
) -> None:
    """The same scenario, evidence, budget and seed give the same document, digit for digit."""
    examples = repository_root / "examples"
    path, log = examples / "relax-4xa6000-qwen3-4b.yaml", examples / "relax-4xa6000-qwen3-4b.baseline.csv"
    scenario = load_scenario(path)
    body: dict[str, Any] = {
        "scenario": scenario.model_dump(mode="json"),
        "budget_bytes": 2 * GIB,
        "seed": 7,
        "draws": 60,
    }
    body["plans"] = ["reload", "keep-window", "lean"]
    if with_site:
        body["evidence_csv"] = log.read_text(encoding="utf-8")
    over_http = service.post("/v1/predictions", body)["prediction"]

    site = parse_site_evidence(log.read_bytes(), "log") if with_site else None
    plans = [named_plan(name) for name in body["plans"]]
    direct = predict(scenario, plans=plans, site=site, budget_bytes=2 * GIB, seed=7, draws=60)
    assert over_http == direct.model_dump(mode="json")

    if backend == "sqlite":  # the command has no database
        options = ["--budget-gib", "2", "--seed", "7", "--draws", "60", "--json"]
        options += [part for name in body["plans"] for part in ("--plan", name)]
        options += ["--evidence", str(log)] if with_site else []
        command = [
            sys.executable,
            "-c",
            "from pitstop.cli import main; main()",
            "predict",
            str(path),
            *options,
        ]
        printed = subprocess.run(command, capture_output=True, check=False, timeout=60)
        assert printed.returncode == 0, printed.stderr.decode()
        assert json.loads(printed.stdout) == over_http


def test_unknown_id(service: Service) -> None:
    document = problem(service.client.get(f"/v1/predictions/{uuid.uuid4()}"), 404)
    assert document["type"] == "urn:pitstop:problem:not-found"


def test_malformed_id(service: Service) -> None:
    document = problem(service.client.get("/v1/predictions/17"), 422)
    assert document["errors"][0]["field"] == "path.prediction_id"


def test_predictions_never_run_on_the_event_loop(sqlite_url: str) -> None:
    """While one is computed, the service still answers; beyond the queue it says so instead of piling up."""
    began, release, threads = threading.Semaphore(0), threading.Event(), []

    def slow(scenario: Any, **given: Any) -> Any:
        threads.append(threading.current_thread().name)
        began.release()
        assert release.wait(20)
        return predict(scenario, plans=given["plans"], seed=given["seed"], draws=given["draws"])

    settings = Settings(database_url=sqlite_url, prediction_workers=1, prediction_queue=1)
    with running(create_app(settings, predictor=slow)) as service, ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(service.client.post, "/v1/predictions", json=documents.request()) for _ in range(2)
        ]
        assert began.acquire(timeout=20)
        assert service.client.get("/healthz/live").status_code == 200
        assert service.client.get("/healthz/ready").status_code == 200
        deadline = time.monotonic() + 20
        slots = service.app.state.prediction_slots
        while slots.free_places:  # until the second has taken the only place to wait
            assert time.monotonic() < deadline
            time.sleep(0.01)
        refused = service.client.post("/v1/predictions", json=documents.request())
        assert problem(refused, 503)["type"] == "urn:pitstop:problem:unavailable"
        assert refused.headers["retry-after"] == "5"
        release.set()
        assert [future.result().status_code for future in asked] == [201, 201]
    assert threading.main_thread().name not in threads
    assert all("AnyIO" in name for name in threads), threads


def test_unsupported_scenario(sqlite_url: str) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedScenarioError("nobody measured this link; measure communicator.create on it")

    with running(create_app(Settings(database_url=sqlite_url), predictor=refuse)) as service:
        before = service.counts()
        document = problem(service.client.post("/v1/predictions", json=documents.request()), 422)
        assert service.counts() == before
    assert document["type"] == "urn:pitstop:problem:unsupported-scenario"
    assert "measure" in document["detail"]
