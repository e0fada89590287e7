"""Plans: the named ones say what design and report say, and bad ones are refused."""

from __future__ import annotations

from typing import Any

import pytest

from pitstop.errors import InvalidInputError, InvalidPlanError
from pitstop.loading import validate
from pitstop.plan import BASELINE, NAMED_PLANS, Backup, Cooldown, Disposition, Plan, named_plan

GOOD = {"name": "mine", "training": "keep"}


def test_the_named_plans() -> None:
    assert set(NAMED_PLANS) == {
        "reload", "reload-deferred", "keep-window", "keep", "suspend", "lean", "lean-released",
    }  # fmt: skip
    assert all(name == plan.name and plan.summary for name, plan in NAMED_PLANS.items())


def test_the_baseline_is_reload_with_fixed_cooldown() -> None:
    assert BASELINE is named_plan("reload")
    assert (BASELINE.training, BASELINE.cooldown, BASELINE.backup) == (
        Disposition.DESTROY, Cooldown.FIXED, Backup.REALLOCATE,
    )  # fmt: skip
    assert not BASELINE.share
    assert not BASELINE.canary


def test_the_deferred_reload_differs_in_the_cooldown_only() -> None:
    deferred, same = named_plan("reload-deferred"), {"name": "", "summary": "", "cooldown": Cooldown.DEADLINE}
    assert deferred.model_copy(update=same) == BASELINE.model_copy(update=same)


@pytest.mark.parametrize("name", ["keep-window", "keep", "suspend", "lean", "lean-released"])
def test_whatever_keeps_a_communicator_checks_it(name: str) -> None:
    assert named_plan(name).canary


def test_lean_plans_share_cap_and_retain() -> None:
    for name in ("lean", "lean-released"):
        plan = named_plan(name)
        assert plan.share
        assert plan.cold_max_ctas == 4
        assert plan.backup is Backup.RETAIN
    assert named_plan("lean-released").dedicated_export
    assert named_plan("lean-released").training is Disposition.DESTROY


@pytest.mark.parametrize(
    ("name", "hint"), [("leen", "Did you mean lean?"), ("", "Use one of: reload"), ("x" * 500, "Use one of")]
)
def test_an_unknown_plan(name: str, hint: str) -> None:
    with pytest.raises(InvalidPlanError) as caught:
        named_plan(name)
    (problem,) = caught.value.problems
    assert problem.field == "plan"
    assert hint in problem.remedy
    assert len(problem.value) <= 120


@pytest.mark.parametrize("name", NAMED_PLANS)
def test_plans_round_trip(name: str) -> None:
    plan = NAMED_PLANS[name]
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize(
    ("changes", "field", "value", "remedy"),
    [
        ({"training": "burn"}, "training", "burn", "'destroy'"),
        ({"cold_max_ctas": 0}, "cold_max_ctas", "0", "at least 1"),
        ({"export_max_ctas": 65}, "export_max_ctas", "65", "at most 64"),
        ({"schema_version": 7}, "schema_version", "7", "version 1"),
        ({"name": "Mine!"}, "name", "Mine!", "characters that match"),
        ({"cooldwon": "fixed"}, "cooldwon", "fixed", "spelling"),
    ],
)
def test_bad_plans(changes: dict[str, Any], field: str, value: str, remedy: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        validate(Plan, {**GOOD, **changes}, "plan")
    (problem,) = caught.value.problems
    assert problem.field == field
    assert value in problem.value
    assert remedy in problem.remedy
