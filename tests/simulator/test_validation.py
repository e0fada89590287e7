"""The bars: held-out observations predicted from other rows, within the promised errors."""

from __future__ import annotations

import pytest

from pitstop_simulator.validation import Case, Validation, validate_predictions


@pytest.fixture(scope="module")
def validation() -> Validation:
    return validate_predictions()


def _cases(validation: Validation, prefix: str, quantity: str) -> dict[str, Case]:
    return {c.id: c for c in validation.cases if c.id.startswith(prefix) and c.quantity == quantity}


def _case(validation: Validation, name: str, quantity: str) -> Case:
    (case,) = (c for c in validation.cases if (c.id, c.quantity) == (name, quantity))
    return case


@pytest.mark.parametrize(("corpus", "observed"), [("task23-4xa6000", 4.77), ("task23-8xh20", 5.41)])
def test_the_reports_gain_is_predicted_from_its_baseline(
    corpus: str, observed: float, validation: Validation
) -> None:
    (case,) = _cases(validation, corpus, "gain_s").values()
    assert case.observed == pytest.approx(observed, abs=0.01)
    assert case.inside
    assert case.ape <= 0.25
    assert (case.predicted.hi - case.predicted.lo) / 2 <= 0.6 * case.observed


SWITCHES = {
    "h200x2-switch-plans-2-reload": (16.8, 999),
    "h200x2-switch-plans-2-keep-window": (9.0, 6323),
    "h200x2-runtime-tp2-lean": (0.375, 2049),
    "h200x2-runtime-tp2-lean-released": (1.13, 1083),
    "h200x2-runtime-tp4-cp2-ep8-lean-released": (4.22, 4712),
}


@pytest.mark.parametrize("arm", SWITCHES)
def test_whole_switches_are_predicted_from_components(arm: str, validation: Validation) -> None:
    seconds, mib = SWITCHES[arm]
    switch, held = (_case(validation, arm, quantity) for quantity in ("switch_s", "held_at_sync_bytes"))
    assert switch.observed == pytest.approx(seconds, rel=0.02)
    assert held.observed / 2**20 == pytest.approx(mib, abs=1)
    if arm.endswith("-lean"):
        assert abs(switch.predicted.mean - switch.observed) <= 0.15
    else:
        assert switch.ape <= 0.15
    assert held.ape <= 0.10
    assert switch.inside


def test_every_held_out_switch_meets_the_bar(validation: Validation) -> None:
    for case in validation.cases:
        if case.id.startswith("h200x2-") and case.quantity == "switch_s":
            # Which rank has the GPU when is a matter of luck: where ranks share one, single switches differ by more.
            limit = 0.15 if case.id.startswith(("h200x2-switch-plans-", "h200x2-runtime-tp2-l")) else 0.25
            assert case.ape <= limit, case.id
        if case.quantity.startswith("held_") and case.id.startswith("h200x2-"):
            assert case.ape <= 0.10, case.id


def test_the_json_has_the_documented_keys(validation: Validation) -> None:
    document = validation.model_dump(mode="json")
    for case in document["cases"]:
        assert {"id", "quantity", "observed", "predicted", "ape", "inside"} <= case.keys()
        assert {"mean", "lo", "hi"} <= case["predicted"].keys()
        assert case["id"].startswith(("task23-4xa6000", "task23-8xh20", "h200x2-"))
        assert case["inside"] == (case["predicted"]["lo"] <= case["observed"] <= case["predicted"]["hi"])
    assert {"n", "median_ape", "p90_ape", "coverage", "refused"} <= document["summary"].keys()


def test_the_summary_is_that_of_the_cases(validation: Validation) -> None:
    summary = validation.summary
    assert summary.n + summary.refused == len(validation.cases)
    assert summary.coverage == pytest.approx(
        sum(c.inside for c in validation.cases if c.support != "refused") / summary.n
    )
    assert summary.median_ape <= summary.p90_ape <= 0.35
    assert summary.coverage >= 0.85
