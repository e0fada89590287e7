"""Plans: the named ones are those of the design, and bad ones are refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pitstop.errors import InvalidInputError, InvalidPlanError
from pitstop.loading import digest, validate
from pitstop.plan import BASELINE, NAMED_PLANS, Backup, Cooldown, Disposition, Export, Plan, named_plan


def test_the_named_plans() -> None:
    assert list(NAMED_PLANS) == [
        "reload",
        "reload-deferred",
        "keep-window",
        "keep",
        "suspend",
        "lean",
        "lean-released",
        "lean-copies",
    ]
    for name, plan in NAMED_PLANS.items():
        assert name == plan.name
        assert plan.summary


def test_the_baseline_pays_a_fixed_cooldown_and_keeps_nothing() -> None:
    assert BASELINE is named_plan("reload")
    assert BASELINE.training is Disposition.DESTROY
    assert BASELINE.cooldown is Cooldown.FIXED
    assert BASELINE.backup is Backup.REALLOCATE
    assert (BASELINE.share, BASELINE.export, BASELINE.canary) == (False, Export.TRAINING, False)


def test_deferred_differs_from_the_baseline_by_its_cooldown_only() -> None:
    deferred = named_plan("reload-deferred").model_dump(exclude={"name", "summary"})
    assert deferred == BASELINE.model_dump(exclude={"name", "summary"}) | {"cooldown": Cooldown.DEADLINE}


def test_every_plan_that_keeps_communicators_checks_them() -> None:
    for plan in NAMED_PLANS.values():
        if plan.training is not Disposition.DESTROY or plan.export is Export.COMMUNICATOR:
            assert plan.canary, plan.name


@pytest.mark.parametrize(("name", "hint"), [("leen", "Did you mean lean?"), ("", ""), ("auto!", "")])
def test_an_unknown_plan_names_the_known_ones(name: str, hint: str) -> None:
    with pytest.raises(InvalidPlanError) as caught:
        named_plan(name)
    (problem,) = caught.value.problems
    assert problem.field == "plan"
    assert problem.value == repr(name)
    assert hint in problem.remedy
    assert "keep-window" in problem.remedy


@pytest.mark.parametrize("plan", NAMED_PLANS.values(), ids=list(NAMED_PLANS))
def test_plans_survive_json(plan: Plan) -> None:
    again = Plan.model_validate_json(plan.model_dump_json())
    assert again == plan
    assert digest(again) == digest(plan)


def test_plans_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        BASELINE.share = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "field", "value", "remedy"),
    [
        ({"training": "burn"}, "training", "'burn'", "'destroy-after-sync'"),
        ({"cold_max_ctas": 0}, "cold_max_ctas", "0", "at least 1"),
        ({"cold_max_ctas": -4}, "cold_max_ctas", "-4", "at least 1"),
        ({"export_max_ctas": 65}, "export_max_ctas", "65", "at most 64"),
        ({"export_max_ctas": float("nan")}, "export_max_ctas", "nan", "finite"),
        ({"name": "Lean!"}, "name", "'Lean!'", "characters"),
        ({"shared": True}, "shared", "True", "spelling"),
        ({"schema_version": 2}, "schema_version", "2", "version 1"),
    ],
)
def test_bad_plans_name_field_value_and_remedy(
    change: dict[str, object], field: str, value: str, remedy: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        validate(Plan, {"name": "mine", "training": "keep"} | change, "request body")
    (problem,) = caught.value.problems
    assert (problem.field, problem.value) == (field, value)
    assert remedy in problem.remedy
