"""Site evidence: the parser's refusals, and conditioning on a baseline."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pitstop.components import Phase
from pitstop.errors import InvalidEvidenceError
from pitstop.plan import NAMED_PLANS
from pitstop.prediction import PlanPrediction
from pitstop.scenario import Scenario
from pitstop_simulator.predict import predict
from pitstop_simulator.site import MAX_EVIDENCE_BYTES, SiteEvidence, parse_site_evidence

HEADER = "step,sleep_s,update_weights_s,wake_up_s"


def record(**changes: Any) -> dict[str, Any]:
    phases = {"sleep": {"total_s": 5.4}, "update_weights": {"total_s": 3.8}, "wake_up": {"total_s": 2.3}}
    return {"schema_version": 1, "step": 2, "phases": phases, **changes}


def test_csv_with_comments_warm_up_and_optional_columns() -> None:
    text = (
        "\ufeff# a comment\nstep, warmup ,sleep_s,update_weights_s,wake_up_s,step_time_s,held_at_sync_bytes,plan\n"
        "0,true,16,3.5,1.6,1100,,reload\n\n1,false,5,4,2,900,1e9,reload\n2,false,6,5,3,1000,3e9,baseline\n"
    )
    site = parse_site_evidence(text.encode(), "log.csv")
    assert site.seconds.tolist() == [[5, 4, 2], [6, 5, 3]]
    assert (site.held_at_sync_bytes, site.step_s, site.steps) == (2e9, 950, 2)


def test_ndjson_and_json_lists_of_step_records_read_alike() -> None:
    records = [record(), record(step=3, step_s=900.0, memory={"held_at_sync_bytes": 5})]
    lines = parse_site_evidence("\n".join(map(json.dumps, records)).encode(), "log.ndjson")
    listed = parse_site_evidence(json.dumps(records).encode(), "log.json")
    assert lines.seconds.tolist() == listed.seconds.tolist() == [[5.4, 3.8, 2.3]] * 2
    assert (lines.held_at_sync_bytes, lines.step_s) == (5.0, 900.0)


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        (b"step,sleep_s\n1,2\n", "update_weights_s, wake_up_s", "columns found: step, sleep_s"),
        (b"1,2,3\n", "sleep_s, update_weights_s, wake_up_s", "required column missing"),
        (f"{HEADER}\n1,nan,4,2\n".encode(), "row 1, sleep_s", "'nan'"),
        (f"{HEADER}\n1,5,inf,2\n".encode(), "row 1, update_weights_s", "'inf'"),
        (f"{HEADER}\n1,5,4,2\n2,5,4,-2\n".encode(), "row 2, wake_up_s", "'-2'"),
        (f"{HEADER}\n1,5,4,\n".encode(), "row 1, wake_up_s", "not a number"),
        (f"{HEADER}\n1,5\n".encode(), "row 1, update_weights_s", "not a number"),
        (f"{HEADER}\n1,5 s,4,2\n".encode(), "row 1, sleep_s", "'5 s'"),
        (f"{HEADER}\n1,5000000,4,2\n".encode(), "row 1, sleep_s", "between 0 and 86400"),
        (f"{HEADER},plan\n1,5,4,2,keep\n".encode(), "row 1, plan", "'keep'"),
        (f"{HEADER},held_at_sync_bytes\n1,5,4,2,-1\n".encode(), "row 1, held_at_sync_bytes", "'-1'"),
        (f"{HEADER}\n".encode(), "(file)", "no steady step"),
        (f"{HEADER},warmup\n1,5,4,2,true\n".encode(), "(file)", "no steady step"),
        (b"", "sleep_s", "required column missing"),
        (b"\xff\xfe\x00", "(file)", "not UTF-8"),
        (b"[", "(file)", "unreadable JSON"),
        (b"{]", "(file)", "unreadable JSON"),
        (b"[]", "(file)", "no steady step"),
        (b"[3]", "", "3"),
        (json.dumps([record(schema_version=2)]).encode(), "schema_version", "version 1"),
        (json.dumps([record(phases={"sleep": {"total_s": 1}})]).encode(), "record 1, phases", "wake_up"),
        (json.dumps([record(phases={"nap": {"total_s": 1}})]).encode(), "phases.nap", "nap"),
        (json.dumps([record(step=-1)]).encode(), "step", "-1"),
        (json.dumps(record(phases={**record()["phases"], "sleep": {"total_s": -1}})).encode(), "phases.sleep", "-1"),
    ],
)  # fmt: skip
def test_unusable_logs_name_field_value_and_remedy(text: bytes, field: str, words: str) -> None:
    with pytest.raises(InvalidEvidenceError) as caught:
        parse_site_evidence(text, "log")
    problem = caught.value.problems[0]
    assert field in problem.field
    assert words in str(problem)
    assert problem.value
    assert problem.remedy
    assert str(caught.value).startswith("log")


def test_a_huge_log_is_refused() -> None:
    with pytest.raises(InvalidEvidenceError, match="more than"):
        parse_site_evidence(b"x" * (MAX_EVIDENCE_BYTES + 1), "log")


def _site(rows: list[list[float]], held: float | None = None) -> SiteEvidence:
    return SiteEvidence(np.array(rows, dtype=float), held_at_sync_bytes=held, step_s=None, digest="d")


def _plan(scenario: Scenario, site: SiteEvidence, name: str, **options: Any) -> PlanPrediction:
    plans = predict(scenario, plans=[NAMED_PLANS[name]], site=site, **options).plans
    return next(p for p in plans if p.plan == name)


def test_conditioning_reproduces_the_baseline(a6000: Scenario, a6000_site: SiteEvidence) -> None:
    reload = _plan(a6000, a6000_site, "reload")
    mean = a6000_site.seconds.mean(axis=0)
    for phase, measured in zip(Phase, mean, strict=True):
        assert reload.phases[phase].mean == pytest.approx(measured, rel=0.02)
        assert reload.phases[phase].lo <= measured <= reload.phases[phase].hi
    assert reload.switch_s.mean == pytest.approx(mean.sum(), rel=0.02)


@pytest.mark.parametrize("scale", [0.8, 1.5, 4.0])
def test_conditioning_follows_the_baseline(scale: float, a6000: Scenario, a6000_site: SiteEvidence) -> None:
    site = _site((a6000_site.seconds * scale).tolist())
    assert _plan(a6000, site, "reload").switch_s.mean == pytest.approx(
        site.seconds.mean(axis=0).sum(), rel=0.02
    )


def test_what_the_baseline_holds_is_taken_over(a6000: Scenario, a6000_site: SiteEvidence) -> None:
    site = _site(a6000_site.seconds.tolist(), held=9e9)
    reload, kept = (_plan(a6000, site, name) for name in ("reload", "keep-window"))
    assert reload.held_at_sync_bytes.mean == pytest.approx(9e9, rel=1e-6)
    assert kept.held_at_sync_bytes.mean > 9e9


@pytest.mark.parametrize(
    ("row", "column"), [([0.5, 4.0, 2.2], "sleep_s"), ([5.3, 1.0, 2.2], "update_weights_s")]
)
def test_a_baseline_shorter_than_its_cooldown_is_an_error_that_names_it(
    row: list[float], column: str, a6000: Scenario
) -> None:
    with pytest.raises(InvalidEvidenceError) as caught:
        predict(a6000, site=_site([row] * 4))
    (problem,) = caught.value.problems
    assert problem.field == column
    assert f"{row[0 if column == 'sleep_s' else 1]:.3f} s" in problem.value
    assert "trainer.cooldown_s" in problem.remedy
