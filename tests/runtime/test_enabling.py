"""Stages of enabling: eligible, ready, fallen back."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from pitstop.plan import BASELINE, NAMED_PLANS, Plan
from pitstop_runtime.enabling import Enabling, Stage

KEEP, LEAN = NAMED_PLANS["keep"], NAMED_PLANS["lean"]
OTHERS = [plan for plan in NAMED_PLANS.values() if plan != BASELINE]
# What training sees of a plan; the rest is what a switch does.
SEEN_BY_TRAINING = ("share", "cold_max_ctas", "hot_max_ctas")


@pytest.mark.parametrize("plan", OTHERS, ids=lambda plan: plan.name)
def test_until_a_weight_sync_went_well_a_switch_goes_the_baselines_way(plan: Plan) -> None:
    enabling = Enabling(plan)
    assert enabling.stage is Stage.ELIGIBLE
    first = enabling.in_force
    for name in Plan.model_fields:
        expected = plan if name in SEEN_BY_TRAINING else BASELINE
        assert getattr(first, name) == getattr(expected, name), name
    enabling.prove()
    assert (enabling.stage, enabling.in_force) == (Stage.READY, plan)
    enabling.prove()
    assert enabling.in_force == plan


def test_the_baseline_needs_no_proof() -> None:
    enabling = Enabling(BASELINE)
    assert (enabling.stage, enabling.in_force, enabling.reason) == (Stage.READY, BASELINE, None)


@pytest.mark.parametrize("proven", [False, True])
@pytest.mark.parametrize("plan", [BASELINE, KEEP, LEAN], ids=lambda plan: plan.name)
def test_a_fall_back_is_for_good(plan: Plan, proven: bool, caplog: pytest.LogCaptureFixture) -> None:
    enabling = Enabling(plan)
    if proven:
        enabling.prove()
    enabling.fall_back("rank 1: canary")
    enabling.fall_back("rank 2: something later")
    for _ in range(2):
        assert (enabling.stage, enabling.in_force) == (Stage.FALLEN_BACK, BASELINE)
        assert enabling.reason == "rank 1: canary"
        enabling.prove()
        assert not enabling.change(LEAN)
        assert not enabling.change(BASELINE)
    assert enabling.plan == plan, "what was wanted stays readable"
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == f"plan {plan.name} is given up for the life of this process: rank 1: canary"


def test_a_change_before_the_proof_has_to_be_proven_too() -> None:
    enabling = Enabling(KEEP)
    assert enabling.change(LEAN)
    assert (enabling.stage, enabling.plan) == (Stage.ELIGIBLE, LEAN)
    assert enabling.in_force != LEAN
    assert enabling.in_force.share
    enabling.prove()
    assert enabling.in_force == LEAN


def test_a_change_after_the_proof_is_in_force_at_once() -> None:
    enabling = Enabling(KEEP)
    enabling.prove()
    for plan in (LEAN, BASELINE, KEEP):
        assert enabling.change(plan)
        assert (enabling.stage, enabling.in_force) == (Stage.READY, plan)


def test_the_baseline_proves_the_next_plan() -> None:
    enabling = Enabling(BASELINE)
    assert enabling.change(LEAN)
    assert enabling.stage is Stage.ELIGIBLE, "no weight sync yet"
    assert enabling.change(BASELINE)
    assert enabling.stage is Stage.READY
    enabling.prove()
    assert enabling.change(LEAN)
    assert enabling.in_force == LEAN


def test_import_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from pitstop.plan import BASELINE\n"
        "from pitstop_runtime.enabling import Enabling; print(Enabling(BASELINE).stage)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "ready"
