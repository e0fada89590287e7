"""Predictions: determinism, budget, support, intervals, and the documented JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pitstop.cli.app import build_app, run
from pitstop.errors import InvalidInputError
from pitstop.plan import NAMED_PLANS
from pitstop.prediction import Interval, Prediction, Verdict
from pitstop.scenario import Scenario
from pitstop.units import GIB
from pitstop_simulator.predict import predict
from pitstop_simulator.site import SiteEvidence

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def by_name(prediction: Prediction, name: str) -> Any:
    return next(p for p in prediction.plans if p.plan == name)


@pytest.fixture(scope="module")
def answer(h200x2: Scenario) -> Prediction:
    return predict(h200x2)


def test_the_same_seed_gives_the_same_answer(h200x2: Scenario, answer: Prediction) -> None:
    assert predict(h200x2) == answer
    assert predict(h200x2, seed=1).plans != answer.plans


def test_a_plans_figures_do_not_depend_on_which_others_are_asked_for(
    h200x2: Scenario, answer: Prediction
) -> None:
    alone = predict(h200x2, plans=[NAMED_PLANS["lean"]])
    assert [p.plan for p in alone.plans] == ["reload", "lean"]
    assert by_name(alone, "lean") == by_name(answer, "lean")


def test_intervals_are_ordered_and_consistent(answer: Prediction) -> None:
    assert [p.plan for p in answer.plans] == list(NAMED_PLANS)
    for p in answer.plans:
        named = [
            p.switch_s,
            p.gain_s,
            p.first_step_s,
            p.held_at_sync_bytes,
            p.held_in_rollout_bytes,
            p.peak_bytes,
        ]
        for interval in [*named, p.host_pinned_bytes, *p.phases.values(), *p.components.values()]:
            assert interval.lo <= interval.mean <= interval.hi
            assert interval.level == 0.9
        assert sum(i.mean for i in p.phases.values()) == pytest.approx(p.switch_s.mean)
        assert sum(i.mean for i in p.components.values()) == pytest.approx(p.switch_s.mean)
        assert p.held_at_sync_bytes.hi <= p.peak_bytes.hi
    reload = by_name(answer, "reload")
    assert (reload.gain_s.lo, reload.gain_s.mean, reload.gain_s.hi) == (0, 0, 0)
    for p in answer.plans:
        assert p.gain_s.mean == pytest.approx(reload.switch_s.mean - p.switch_s.mean)


def test_the_budget_marks_plans(h200x2: Scenario) -> None:
    roomy, tight, none = (predict(h200x2, budget_bytes=round(gib * GIB), draws=50) for gib in (100, 2, 0.1))
    assert all(p.within_budget for p in roomy.plans)
    fitting = {p.plan for p in tight.plans if p.within_budget}
    assert fitting == {"reload", "reload-deferred", "suspend", "lean-released", "lean-copies"}
    assert tight.recommended.plan in fitting
    assert not any(p.within_budget for p in none.plans)
    assert none.recommended.plan == "reload"
    assert "budget" in none.recommended.reasons[0]


@pytest.mark.parametrize(
    ("nccl", "verdict", "words"),
    [
        ("2.28.9", Verdict.REFUSED, "runs 2.28.9"),
        ("2.29.6", Verdict.REFUSED, "NCCL >= 2.29.7"),
        ("2.30.7", Verdict.INSIDE, None),
        (None, Verdict.EXTRAPOLATED, "versions.nccl"),
    ],
)
def test_suspend_needs_a_recent_nccl(
    nccl: str | None, verdict: Verdict, words: str | None, h200x2: Scenario
) -> None:
    versions = h200x2.versions.model_copy(update={"nccl": nccl})
    result = predict(h200x2.model_copy(update={"versions": versions}), draws=50)
    support = by_name(result, "suspend").support
    assert support.verdict is verdict
    assert words is None or words in " ".join(support.reasons)
    assert by_name(result, "reload").support.verdict is not Verdict.REFUSED
    assert result.recommended.plan != "suspend"


def test_amd_is_refused_with_what_to_measure(make_scenario: Any) -> None:
    result = predict(make_scenario(hardware={"gpu": "mi300x", "gpus_per_node": 2}), draws=50)
    assert {p.support.verdict for p in result.plans} == {Verdict.REFUSED}
    assert "measure" in " ".join(result.support.reasons)
    assert result.recommended.plan == "reload"


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, Verdict.INSIDE),
        ({"hardware": {"gpu": "h200", "gpus_per_node": 4}, "layout": {"tp": 4}}, None),
        ({"hardware": {"gpu": "h20", "gpus_per_node": 2}}, Verdict.EXTRAPOLATED),
        ({"hardware": {"gpu": "h200", "gpus_per_node": 8, "nodes": 2}}, Verdict.EXTRAPOLATED),
    ],
)
def test_support_follows_the_measured_range(
    changes: dict[str, Any], verdict: Verdict | None, make_scenario: Any
) -> None:
    trainer = {"saved_bytes_per_rank": 4 * GIB, "group_creation": "eager"}
    support = predict(make_scenario(trainer=trainer, **changes), draws=50).support
    assert verdict is None or support.verdict is verdict
    assert (support.verdict is Verdict.INSIDE) == (not support.reasons)


def test_a_single_rank_has_no_communicator_to_keep_and_is_told_so(make_scenario: Any) -> None:
    alone = make_scenario(hardware={"gpu": "h200", "gpus_per_node": 1}, layout={"tp": 1})
    result = predict(alone, draws=50)
    for name in ("reload-deferred", "keep-window", "keep"):
        plan = by_name(result, name)
        assert abs(plan.gain_s.mean) < 0.05
        assert plan.communicators == 0
        assert any("no communicator to keep" in note for note in plan.notes)
    assert by_name(result, "lean").host_pinned_bytes.mean > 0


def _site(rows: Any) -> SiteEvidence:
    return SiteEvidence(np.asarray(rows, dtype=float), held_at_sync_bytes=None, step_s=None, digest="d")


def test_more_site_steps_narrow_the_interval(a6000: Scenario, a6000_site: SiteEvidence) -> None:
    def width(site: SiteEvidence, name: str, what: str) -> float:
        plan = by_name(predict(a6000, plans=[NAMED_PLANS[name]], site=site, draws=400), name)
        interval: Interval = getattr(plan, what)
        return interval.hi - interval.lo

    rows = a6000_site.seconds
    one, four, forty = _site(rows[:1]), _site(rows), _site(np.tile(rows, (10, 1)))
    assert width(forty, "keep-window", "gain_s") < width(four, "keep-window", "gain_s")
    assert width(four, "keep-window", "gain_s") < width(one, "keep-window", "gain_s")
    assert width(forty, "reload", "switch_s") < 0.5 * width(four, "reload", "switch_s")


def test_site_evidence_narrows_a_strange_machine(a6000: Scenario, a6000_site: SiteEvidence) -> None:
    general, own = predict(a6000), predict(a6000, site=a6000_site)
    for name in ("reload", "keep-window"):
        a, b = by_name(general, name).switch_s, by_name(own, name).switch_s
        assert b.hi - b.lo < 0.5 * (a.hi - a.lo)
    assert own.calibration.site_rows_used == 4
    assert general.calibration.site_rows_used == 0


@pytest.mark.parametrize("options", [{"draws": 1}, {"draws": 10**6}, {"budget_bytes": -1}, {"seed": -1}])
def test_bad_arguments(options: dict[str, Any], h200x2: Scenario) -> None:
    with pytest.raises(InvalidInputError) as caught:
        predict(h200x2, **options)
    (problem,) = caught.value.problems
    assert problem.field in options
    assert problem.value == str(next(iter(options.values())))
    assert problem.remedy


def _is_interval(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"mean", "lo", "hi", "level"}


def test_the_documented_json(capsys: pytest.CaptureFixture[str]) -> None:
    scenario, log = (EXAMPLES / f"relax-4xa6000-qwen3-4b.{end}" for end in ("yaml", "baseline.csv"))
    assert run(build_app, ["predict", str(scenario), "--evidence", str(log), "--json", "--draws", "50"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["calibration"]["id"].startswith("cal-")
    assert document["calibration"]["rows_used"] > 100
    assert document["recommended"]["plan"] in NAMED_PLANS
    assert {"pitstop", "simpy", "numpy", "python"} <= document["versions"].keys()
    for plan in document["plans"]:
        assert set(plan["phases"]) == {"sleep", "update_weights", "wake_up"}
        names = ("switch_s", "gain_s", "held_at_sync_bytes", "held_in_rollout_bytes", "host_pinned_bytes")
        assert all(_is_interval(plan[name]) for name in names)
        assert all(_is_interval(value) for value in [*plan["phases"].values(), *plan["components"].values()])
        assert plan["support"]["verdict"] in {"inside", "edge", "extrapolated", "refused"}
        assert isinstance(plan["support"]["reasons"], list)
    assert Prediction.model_validate(document).scenario == "relax-4xa6000-qwen3-4b"
