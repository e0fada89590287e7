"""Compare predictions with held-out observations: error and coverage per quantity.

The held-out rows take no part in fitting (``Evidence.fit`` never returns them) nor in the site evidence, which is made
of baseline rows only. Each case says what was predicted from what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pitstop.components import Phase
from pitstop.plan import NAMED_PLANS, Plan
from pitstop.prediction import Interval, PlanPrediction, Verdict
from pitstop.scenario import Scenario, StrictModel
from pitstop.units import GIB

from .calibration import Calibration, load_calibration
from .evidence import Evidence, Row, UseOfRow, load_evidence
from .predict import predict
from .site import SiteEvidence

REPORT_DRAWS = 1000
"""A single step per arm makes wide intervals: their ends need more draws to be steady."""

SWITCH_DRAWS = 400


class Case(StrictModel):
    """One held-out value and its prediction; ``ape`` is |predicted mean - observed| / |observed|."""

    id: str
    quantity: str
    observed: float
    predicted: Interval
    ape: float
    inside: bool
    support: Verdict
    steps: int


class Summary(StrictModel):
    """Over all cases that were not refused."""

    n: int
    median_ape: float
    p90_ape: float
    coverage: float
    level: float
    refused: int


class Validation(StrictModel):
    """All cases and their summary."""

    calibration: str
    cases: list[Case]
    summary: Summary


@dataclass(frozen=True, slots=True)
class _Arm:
    """A held-out arm: its scenario, its plan as it was carried out, and its steady rows."""

    id: str
    scenario: Scenario
    plan: Plan
    rows: list[Row]


def validate_predictions(
    evidence: Evidence | None = None, calibration: Calibration | None = None, *, seed: int = 0
) -> Validation:
    """Predict every held-out arm of the bundled corpus and compare."""
    evidence = evidence or load_evidence()
    calibration = calibration or load_calibration()
    cases = [*_report_cases(evidence, calibration, seed), *_switch_cases(evidence, calibration, seed)]
    errors = np.array([c.ape for c in cases if c.support is not Verdict.REFUSED])
    inside = [c.inside for c in cases if c.support is not Verdict.REFUSED]
    return Validation(
        calibration=calibration.id,
        cases=cases,
        summary=Summary(
            n=len(errors),
            median_ape=float(np.median(errors)),
            p90_ape=float(np.quantile(errors, 0.9)),
            coverage=float(np.mean(inside)),
            level=cases[0].predicted.level,
            refused=len(cases) - len(errors),
        ),
    )


def _case(
    arm: str, quantity: str, observed: float, interval: Interval, prediction: PlanPrediction, steps: int
) -> Case:
    return Case(
        id=arm,
        quantity=quantity,
        observed=observed,
        predicted=interval,
        ape=abs(interval.mean - observed) / abs(observed),
        inside=interval.lo <= observed <= interval.hi,
        support=prediction.support.verdict,
        steps=steps,
    )


# -- the report: keep-window predicted from baseline rows alone ---------------------------------------


def _report_cases(evidence: Evidence, calibration: Calibration, seed: int) -> Iterator[Case]:
    for corpus, document in REPORT_SCENARIOS.items():
        scenario = Scenario.model_validate(document)
        baseline, kept = (
            evidence.select(corpus=corpus, use=use) for use in (UseOfRow.SITE, UseOfRow.HOLDOUT)
        )
        seconds = np.array([_values(baseline, phase.value) for phase in Phase]).T
        low_high = [v for name in ("held_at_sync.low", "held_at_sync.high") for v in _values(baseline, name)]
        held = float(np.mean(low_high)) if low_high else None
        site = SiteEvidence(seconds=seconds, held_at_sync_bytes=held, step_s=None, digest=corpus)
        result = predict(
            scenario, plans=[NAMED_PLANS["keep-window"]], site=site, calibration=calibration, seed=seed,
            draws=REPORT_DRAWS,
        )  # fmt: skip
        plan = next(p for p in result.plans if p.plan == "keep-window")
        observed = {phase: float(np.mean(_values(kept, phase.value))) for phase in Phase}
        switch = float(np.mean(_values(kept, "switch")))
        gain = float(np.mean(_values(baseline, "switch"))) - switch
        name, steps = f"{corpus}-keep-window", site.steps
        yield _case(name, "gain_s", gain, plan.gain_s, plan, steps)
        yield _case(name, "switch_s", switch, plan.switch_s, plan, steps)
        for phase in Phase:
            yield _case(name, f"phases.{phase.value}", observed[phase], plan.phases[phase], plan, steps)
        if held is not None:
            low, high = (_values(kept, f"held_at_sync.{end}")[0] for end in ("low", "high"))
            yield _case(name, "held_at_sync_bytes", (low + high) / 2, plan.held_at_sync_bytes, plan, steps)


def _values(rows: list[Row], quantity: str) -> list[float]:
    return [row.value for row in rows if row.quantity == quantity]


REPORT_SCENARIOS: dict[str, dict[str, Any]] = {
    "task23-4xa6000": {
        "name": "task23-4xa6000",
        "hardware": {"gpu": "rtx-a6000", "gpus_per_node": 4, "link": "nvlink-bridge"},
        "layout": {"tp": 2, "dp": 2},
        "model": "qwen3-4b",
        "trainer": {"group_creation": "lazy", "cooldown_s": 2.0, "rollout_s": 500},
        "engine": {"name": "sglang", "tp": 4},
        "versions": {"torch": "2.11.0+cu129"},
    },
    "task23-8xh20": {
        "name": "task23-8xh20",
        "hardware": {"gpu": "h20", "gpus_per_node": 8},
        "layout": {"tp": 4, "cp": 2, "ep": 8, "etp": 1},
        "model": "qwen3-30b-a3b",
        "optimizer": {"cpu_offload": True},
        "trainer": {"group_creation": "lazy", "cooldown_s": 2.0, "rollout_s": 200},
        "engine": {"name": "sglang", "tp": 8},
        "versions": {"torch": "2.11.0+cu129", "nccl": "2.28.9"},
    },
}


# -- whole switches on two H200, predicted from components --------------------------------------------


def _switch_cases(evidence: Evidence, calibration: Calibration, seed: int) -> Iterator[Case]:
    for arm in _switch_arms(evidence):
        steps = len(_values(arm.rows, "switch"))
        result = predict(
            arm.scenario,
            plans=[arm.plan],
            calibration=calibration,
            seed=seed,
            draws=SWITCH_DRAWS,
            steps=steps,
        )
        plan = next(p for p in result.plans if p.plan == arm.plan.name)
        for quantity, name, interval in (
            ("switch_s", "switch", plan.switch_s),
            ("held_at_sync_bytes", "held_at_sync", plan.held_at_sync_bytes),
            ("held_in_rollout_bytes", "held_in_rollout", plan.held_in_rollout_bytes),
        ):
            if observed := _values(arm.rows, name):
                yield _case(arm.id, quantity, float(np.mean(observed)), interval, plan, steps)


def _switch_arms(evidence: Evidence) -> Iterator[_Arm]:
    for corpus in ("h200x2-switch-plans", "h200x2-runtime"):
        arms: dict[str, list[Row]] = {}
        for row in evidence.select(corpus=corpus, use=UseOfRow.HOLDOUT):
            where = row.layout if corpus == "h200x2-runtime" else row.world_size
            arms.setdefault(f"{corpus}-{where}-{row.plan}", []).append(row)
        for name, rows in arms.items():
            yield _Arm(name, _switch_scenario(rows[0]), _as_carried_out(rows[0]), rows)


def _switch_scenario(row: Row) -> Scenario:
    ranks_per_gpu = row.ranks_per_gpu or 1
    sizes = {part[:2]: int(part[2:]) for part in row.layout.split("-")}
    moe = "ep" in sizes
    return Scenario.model_validate(
        {
            "name": "h200x2",
            "hardware": {"gpu": "h200", "gpus_per_node": 2, "ranks_per_gpu": ranks_per_gpu},
            "layout": {**sizes, **({"etp": 1} if moe else {})},
            "model": "qwen3-30b-a3b" if moe else "qwen3-0.6b",
            # As the scripts did it: all groups touched, no engine, 8 GiB per GPU saved, half of it gathered over TP.
            "trainer": {
                "group_creation": "eager",
                "clear_memory": False,
                "rollout_s": 10,
                "saved_bytes_per_rank": 8 * GIB // ranks_per_gpu,
                "export_bytes_per_rank": 4 * GIB // ranks_per_gpu,
            },
            "engine": {"name": "none"},
            "versions": {"torch": "2.11.0+cu130", "nccl": "2.30.7", "megatron": "0.19.2"},
        }
    )


def _as_carried_out(row: Row) -> Plan:
    """The plan of a held-out row; the first script capped no cold communicator, the runtime's campaign hot ones too."""
    plan = NAMED_PLANS[row.plan]
    if row.corpus == "h200x2-runtime":
        return plan.model_copy(update={"hot_max_ctas": row.max_ctas} if plan.share else {})
    return plan.model_copy(update={"cold_max_ctas": None})
