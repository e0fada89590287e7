"""Bad input is refused with field, value and remedy, and stores nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .documents import EVIDENCE, changed, manifest, request, scenario, step
from .server import Service, problem

P, R, S = "/v1/predictions", "/v1/runs", "/v1/runs/{run}/steps"
NAN_CSV = EVIDENCE.replace("5.80", "NaN")

# name: (path, document, part of the field's name, part of the value)
TABLE: dict[str, tuple[str, Any, str, str]] = {
    "layout not divisible": (P, request(scenario=scenario(layout__tp=3)), "layout", "3"),
    "experts without a MoE model": (P, request(scenario=scenario(layout={"tp": 2, "ep": 2})), "layout.ep", "2"),
    "unknown GPU": (P, request(scenario=scenario(hardware__gpu="h9000")), "scenario.hardware.gpu", "h9000"),
    "unknown model": (P, request(scenario=scenario(model="gpt-9")), "scenario.model", "gpt-9"),
    "unknown plan": (P, request(plans=["reload", "leen"]), "plans.1", "leen"),
    "plan named twice": (P, request(plans=["lean", "lean"]), "plans.1", "lean"),
    "no plans": (P, request(plans=[]), "plans", "[]"),
    "negative seconds": (P, request(scenario=scenario(trainer__rollout_s=-1)), "trainer.rollout_s", "-1"),
    "absurd size": (P, request(scenario=scenario(hardware__nodes=10**12)), "hardware.nodes", "1000000000000"),
    "too many ranks": (P, request(scenario=scenario(hardware={"gpu": "h200", "gpus_per_node": 72, "nodes": 900_000})),
                       "hardware", "900000"),
    "infinite by exponent": (P, request(scenario=scenario(trainer__rollout_s=float("1e308"))), "rollout_s", "1e+308"),
    "too few draws": (P, request(draws=49), "draws", "49"),
    "too many draws": (P, request(draws=2001), "draws", "2001"),
    "negative seed": (P, request(seed=-1), "seed", "-1"),
    "no budget at all": (P, request(budget_bytes=0), "budget_bytes", "0"),
    "unknown schema version": (P, request(scenario=scenario(schema_version=2)), "scenario.schema_version", "2"),
    "misspelt field": (P, request(scenario=scenario(layuot={"tp": 2})), "scenario.layuot", "2"),
    "missing field": (P, {"plans": ["lean"]}, "scenario", ""),
    "not an object": (P, [1, 2], "(top level)", "1"),
    "text where a number belongs": (P, request(draws="many"), "draws", "many"),
    "evidence without a column": (P, request(evidence_csv="sleep_s,wake_up_s\n1,2\n"), "update_weights_s", "sleep_s"),
    "evidence with NaN": (P, request(evidence_csv=NAN_CSV), "update_weights_s", "NaN"),
    "evidence without rows": (P, request(evidence_csv="sleep_s,update_weights_s,wake_up_s\n"), "file", "no rows"),
    "evidence of another plan": (P, request(evidence_csv="plan,sleep_s,update_weights_s,wake_up_s\nkeep,1,2,3\n"),
                                 "plan", "keep"),
    "evidence in milliseconds": (P, request(evidence_csv=EVIDENCE.replace("12.", "12000000.")), "sleep_s", "12000000"),
    "run: unknown schema version": (R, manifest(schema_version=7), "schema_version", "7"),
    "run: bad plan": (R, manifest(plan__training="explode"), "plan.training", "explode"),
    "run: time without a zone": (R, manifest(started_at="2026-01-15T08:30:00"), "started_at", "2026"),
    "run: layout not divisible": (R, manifest(scenario=scenario(layout__pp=5)), "layout", "5"),
    "step: unknown schema version": (S, {"steps": [step(0), step(1, schema_version=2)]}, "steps.1.schema_version", "2"),
    "step: negative number": (S, {"steps": [step(-1)]}, "steps.0.step", "-1"),
    "step: number beyond 2^53": (S, {"steps": [step(2**53 + 1)]}, "steps.0.step", str(2**53 + 1)),
    "step: longer than a day": (S, {"steps": [step(0, 86_401.0)]}, "total_s", "86401"),
    "step: unknown phase": (S, {"steps": [step(0, phases={"nap": {"total_s": 1}})]}, "nap", "nap"),
    "step: no phase": (S, {"steps": [step(0, phases={})]}, "phases", "{}"),
    "step: unknown component": (S, {"steps": [step(0, phases__sleep__components_s={"magic": 1.0})]}, "magic", "magic"),
    "step: absurd memory": (S, {"steps": [step(0, memory={"held_at_sync_bytes": 2**60})]}, "held_at_sync", str(2**60)),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_refused_with_field_value_and_remedy(service: Service, run_id: str, name: str) -> None:
    path, document, field, value = TABLE[name]
    before = service.counts()
    answer = service.client.post(path.format(run=run_id), json=document)
    errors = problem(answer, 422)["errors"]
    assert any(field in e["field"] and value in e["value"] for e in errors), errors
    assert service.counts() == before


RAW: dict[str, tuple[str, bytes, str]] = {
    "NaN": (S, b'{"steps":[{"step":0,"phases":{"sleep":{"total_s":NaN}}}]}', "NaN"),
    "Infinity": (S, b'{"steps":[{"step":0,"phases":{"sleep":{"total_s":-Infinity}}}]}', "-Infinity"),
    "overflow": (S, b'{"steps":[{"step":0,"phases":{"sleep":{"total_s":1e999}}}]}', "inf"),
    "duplicate key": (S, b'{"steps":[{"step":0,"step":1,"phases":{"sleep":{"total_s":1}}}]}', "two values"),
    "not JSON": (S, b"{steps: 1}", "line 1"),
    "cut off": (P, json.dumps(request()).encode()[:-3], "line 1"),
    "not UTF-8": (R, b'{"arm": "\xff"}', "byte 9"),
    "UTF-16": (R, json.dumps(manifest()).encode("utf-16"), "byte 0"),
    "too deep": (R, b"[" * 200_000, "200,000 bytes"),
    "endless number": (R, b'{"warmup_steps": ' + b"9" * 10_000 + b"}", "a number"),
    "NUL in text": (R, json.dumps(manifest(arm="a\0b")).encode(), "x00"),
    "half a surrogate pair": (R, json.dumps(manifest(arm="\ud83d")).encode(), "ud83d"),
    "NUL in a name": (R, b'{"a\\u0000": 1}', "x00"),
}


@pytest.mark.parametrize("name", RAW)
def test_only_strict_json(service: Service, run_id: str, name: str) -> None:
    path, body, value = RAW[name]
    before = service.counts()
    answer = service.client.post(
        path.format(run=run_id), content=body, headers={"Content-Type": "application/json"}
    )
    errors = problem(answer, 422)["errors"]
    assert any(value in e["value"] for e in errors), errors
    assert service.counts() == before


def test_unicode_is_welcome(service: Service) -> None:
    document = manifest(arm="基线 🚀", provenance={"who": "Zoë"})
    run = service.post("/v1/runs", document)["id"]
    assert service.client.get(f"/v1/runs/{run}").json()["manifest"]["arm"] == "基线 🚀"


def test_a_flood_of_errors_is_cut_short(service: Service, run_id: str) -> None:
    batch = {"steps": [changed(step(n), phases__sleep__total_s=-1, step=-1) for n in range(5_000)]}
    document = problem(service.client.post(f"/v1/runs/{run_id}/steps", json=batch), 422)
    assert len(document["errors"]) == 100
    assert "10000 problems" in document["detail"]
