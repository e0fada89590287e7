"""The OpenAPI document: complete, described, and its examples work."""

from __future__ import annotations

from typing import Any

import pytest

from pitstop_service.web.openapi import ProblemDetails

from .server import PROBLEM, Service, problem

ENDPOINTS = {
    ("post", "/v1/predictions"),
    ("get", "/v1/predictions/{prediction_id}"),
    ("post", "/v1/runs"),
    ("get", "/v1/runs/{run_id}"),
    ("post", "/v1/runs/{run_id}/steps"),
    ("get", "/v1/runs/{run_id}/steps"),
    ("get", "/healthz/live"),
    ("get", "/healthz/ready"),
}
# The vocabulary describes itself in pitstop; these are ours.
OURS = {
    "FieldProblemOut", "Health", "PhaseSummary", "PredictionOut", "PredictionRequest", "ProblemDetails", "Readiness",
    "RunCreated", "RunOut", "RunSummary", "StepBatch", "StepBatchOut", "StepPage",
}  # fmt: skip


@pytest.fixture(scope="module")
def document(service: Service) -> dict[str, Any]:
    answer = service.client.get("/openapi.json")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def _operations(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(method, path): op for path, ops in document["paths"].items() for method, op in ops.items()}


def test_endpoints_are_described(document: dict[str, Any]) -> None:
    operations = _operations(document)
    assert operations.keys() == ENDPOINTS
    for key, operation in operations.items():
        assert operation["description"], key
        for parameter in operation.get("parameters", []):
            assert parameter["description"], (key, parameter)


def test_every_error_is_a_problem_document(document: dict[str, Any]) -> None:
    for key, operation in _operations(document).items():
        failures = {code: r for code, r in operation["responses"].items() if int(code) >= 400}
        assert "500" in failures, key
        assert {tuple(r["content"]) for r in failures.values()} == {(PROBLEM,)}, key
    assert not {"HTTPValidationError", "ValidationError"} & document["components"]["schemas"].keys()


def test_every_field_is_described(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert schemas.keys() >= OURS
    missing = [
        f"{name}.{field}"
        for name in sorted(OURS)
        for field, schema in schemas[name]["properties"].items()
        if not schema.get("description")
    ]
    assert missing == []


def test_references_resolve(document: dict[str, Any]) -> None:
    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [ref for item in value.values() for ref in references(item)]
        return [ref for item in value for ref in references(item)] if isinstance(value, list) else []

    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= known


def test_examples_work(service: Service, document: dict[str, Any]) -> None:
    """Every request example is sent as it stands, and what it created is read back."""
    operations, ids, executed = _operations(document), {}, 0
    for path in ("/v1/predictions", "/v1/runs", "/v1/runs/{run_id}/steps"):
        examples = operations["post", path]["requestBody"]["content"]["application/json"]["examples"]
        assert examples
        for example in examples.values():
            assert example["summary"]
            answer = service.client.post(path.format(**ids), json=example["value"])
            assert answer.is_success, answer.text
            executed += 1
            if location := answer.headers.get("location"):
                ids[{"/v1/predictions": "prediction_id", "/v1/runs": "run_id"}[path]] = answer.json()["id"]
                assert service.client.get(location).status_code == 200
    posts = [op for (method, _), op in operations.items() if method == "post"]
    assert executed == sum(len(op["requestBody"]["content"]["application/json"]["examples"]) for op in posts)
    for method, path in ENDPOINTS:
        if method == "get":
            assert service.client.get(path.format(**ids)).status_code == 200, path


def test_the_problem_example_is_what_the_service_answers(service: Service, document: dict[str, Any]) -> None:
    example = document["components"]["schemas"]["ProblemDetails"]["example"]
    body = {**next(iter(document["paths"]["/v1/predictions"]["post"]["requestBody"]["content"]["application/json"]
                        ["examples"].values()))["value"], "draws": 10}  # fmt: skip
    answer = service.client.post("/v1/predictions", json=body)
    assert problem(answer, 422) == example
    ProblemDetails.model_validate(example)
