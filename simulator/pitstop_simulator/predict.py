"""Predict a scenario: calibration -> draws -> schedules -> SimPy -> intervals -> recommendation."""

from __future__ import annotations

import gc
import platform
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np

from pitstop import __version__
from pitstop.components import Component, Phase
from pitstop.errors import FieldProblem, InvalidInputError
from pitstop.inventory import RankClass, rank_classes
from pitstop.loading import digest
from pitstop.plan import BASELINE, NAMED_PLANS, Backup, Plan
from pitstop.prediction import CalibrationRef, Interval, PlanPrediction, Prediction, Support, TimelinePoint
from pitstop.scenario import Scenario

from .calibration import Array, Calibration, Draws, load_calibration
from .costs import ClassCosts, SiteFactors
from .engine import SwitchResult, simulate
from .planner import dominant_component, recommend
from .schedule import Schedule, build_schedule
from .site import SiteEvidence, condition
from .support import condition_of, judge, judge_plan, version_notes

LEVEL = 0.9
MIN_DRAWS, MAX_DRAWS = 50, 5000
FUTURE_RUN_STEPS = 8
"""Steady steps that a predicted run is averaged over, where the user gives no log of their own."""

_PRIOR_DRAWS_PER_DRAW = 100


def predict(
    scenario: Scenario,
    *,
    plans: Sequence[Plan] | None = None,
    site: SiteEvidence | None = None,
    calibration: Calibration | None = None,
    budget_bytes: int | None = None,
    seed: int = 0,
    draws: int = 200,
    steps: int | None = None,
) -> Prediction:
    """Predict plans on a scenario; the same inputs give the same numbers.

    Args:
        scenario: what to predict.
        plans: plans to predict; all named plans by default. `reload` is always among them, since gains refer to it.
        site: the user's own baseline.
        calibration: the bundled one by default.
        budget_bytes: limit on device bytes per GPU held at weight sync and in the rollout.
        seed: of all random numbers.
        draws: Monte Carlo draws, 50 to 5,000.
        steps: steady steps that the predicted run's means are over; default: as many as the site evidence has, else 8.

    Raises:
        InvalidInputError: an argument is out of range, or the site evidence contradicts the scenario.
    """
    _check(draws, budget_bytes, seed)
    calibration = calibration or load_calibration()
    chosen = list(plans or NAMED_PLANS.values())
    if all(plan.name != BASELINE.name for plan in chosen):
        chosen.insert(0, BASELINE)
    classes = rank_classes(scenario)
    # Machines differ: parameters spread wider unless the scenario runs on the GPU that was measured.
    foreign = scenario.hardware.gpu not in calibration.ranges.gpus
    steps = steps or (site.steps if site else FUTURE_RUN_STEPS)
    count = draws * _PRIOR_DRAWS_PER_DRAW if site else draws
    sampled = Draws(calibration, count, seed, foreign=foreign, steps=steps)
    notes: list[str] = []
    baseline_factors = other_factors = SiteFactors.none(sampled)
    if site:
        prior = [
            build_schedule(ClassCosts(scenario, c, sampled), BASELINE, baseline_factors) for c in classes
        ]
        fitted = condition(site, prior, sampled, draws, seed)
        sampled, baseline_factors, other_factors = fitted.draws, fitted.baseline, fitted.another_run
        if fitted.effective_draws < draws / 4:
            notes.append(
                "the baseline log is unusual for this scenario: check layout, saved bytes and cooldown"
            )
        if site.steps == 1:
            notes.append("the baseline log has one step: step-to-step spread is taken from other machines")
    costs = [ClassCosts(scenario, c, sampled) for c in classes]
    schedules = {
        plan.name: [
            build_schedule(c, plan, baseline_factors if plan == BASELINE else other_factors) for c in costs
        ]
        for plan in chosen
    }
    reload_schedules = schedules[BASELINE.name]
    heaviest = max(reload_schedules, key=lambda s: s.communicators)
    general = judge(scenario, calibration, heaviest, site=site is not None)
    runs = {plan.name: _simulate(scenario, schedules[plan.name], draws) for plan in chosen}
    reference = np.array([run.switch_s for run in runs[BASELINE.name]])
    shift = _overhead_shift(site, runs[BASELINE.name])
    predictions = [
        _plan_prediction(
            plan, scenario, classes, schedules[plan.name], runs[plan.name], reference, shift, budget_bytes,
            judge_plan(plan, scenario, general),
        )
        for plan in chosen
    ]  # fmt: skip
    baseline = next(p for p in predictions if p.plan == BASELINE.name)
    return Prediction(
        scenario=scenario.name,
        scenario_digest=digest(scenario),
        seed=seed,
        draws=draws,
        calibration=CalibrationRef(
            id=calibration.id,
            rows_used=len(calibration.row_ids),
            site_rows_used=site.steps if site else 0,
            site_evidence=site.digest if site else None,
        ),
        budget_bytes=budget_bytes,
        plans=predictions,
        support=general,
        recommended=recommend(predictions, budget_bytes),
        dominant=dominant_component(baseline),
        versions={
            "pitstop": __version__,
            "simpy": version("simpy"),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        scenario_versions=scenario.versions,
        version_notes=[*version_notes(scenario, calibration.ranges), *notes],
    )


def _check(draws: int, budget_bytes: int | None, seed: int) -> None:
    problems = []
    if not MIN_DRAWS <= draws <= MAX_DRAWS:
        problems.append(
            FieldProblem("draws", str(draws), f"not between {MIN_DRAWS} and {MAX_DRAWS}", "Use 200.")
        )
    if budget_bytes is not None and not 0 < budget_bytes <= 2**50:
        problems.append(
            FieldProblem("budget_bytes", str(budget_bytes), "not a positive size", "Give bytes per GPU.")
        )
    if not 0 <= seed < 2**63:
        problems.append(FieldProblem("seed", str(seed), "not between 0 and 2^63 - 1", "Use 0."))
    if problems:
        raise InvalidInputError("prediction request", problems)


def _simulate(scenario: Scenario, schedules: list[Schedule], draws: int) -> list[SwitchResult]:
    trainer = scenario.trainer
    # Simulations leave hundreds of thousands of events behind, none of them in cycles that matter meanwhile.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return [
            simulate(
                schedules,
                draw,
                ranks_per_gpu=scenario.hardware.ranks_per_gpu,
                cooldown_s=trainer.cooldown_s,
                rollout_s=trainer.rollout_s,
            )
            for draw in range(draws)
        ]
    finally:
        if collecting:
            gc.enable()


def _overhead_shift(site: SiteEvidence | None, baseline: list[SwitchResult]) -> float | Array:
    """What the site holds at sync beyond the laws (other libraries, caches), added to every plan alike."""
    if site is None or site.held_at_sync_bytes is None:
        return 0.0
    return site.held_at_sync_bytes - np.array([run.held_at_sync_bytes for run in baseline])


def _plan_prediction(
    plan: Plan,
    scenario: Scenario,
    classes: list[RankClass],
    schedules: list[Schedule],
    runs: list[SwitchResult],
    reference: Array,
    shift: float | Array,
    budget_bytes: int | None,
    support: Support,
) -> PlanPrediction:
    switch = np.array([run.switch_s for run in runs])
    held_sync = np.array([run.held_at_sync_bytes for run in runs]) + shift
    held_rollout = np.array([run.held_in_rollout_bytes for run in runs]) + shift
    retained = plan.backup is Backup.RETAIN
    per_node = max(s.saved_bytes for s in schedules) * scenario.hardware.ranks_per_node if retained else 0.0
    components = {c: np.array([run.component_s.get(c, 0.0) for run in runs]) for c in Component}
    middle = runs[int(np.argsort(switch)[len(switch) // 2])]
    at_sync, in_rollout = interval(held_sync), interval(held_rollout)
    return PlanPrediction(
        plan=plan.name,
        switch_s=interval(switch),
        phases={phase: interval(np.array([run.phase_s[phase] for run in runs])) for phase in Phase},
        components={c: interval(v) for c, v in components.items() if v.any()},
        gain_s=interval(reference - switch),
        first_step_s=interval(np.max([s.first_step_s for s in schedules], axis=0)),
        held_at_sync_bytes=at_sync,
        held_in_rollout_bytes=in_rollout,
        host_pinned_bytes=interval(np.array([per_node])),
        peak_bytes=interval(np.array([run.peak_bytes for run in runs]) + shift),
        communicators=max(s.communicators for s in schedules),
        within_budget=budget_bytes is None or max(at_sync.hi, in_rollout.hi) <= budget_bytes,
        condition=condition_of(plan, scenario),
        support=support,
        notes=_plan_notes(plan, classes, schedules),
        timeline=[
            TimelinePoint(
                at_s=round(m.at_s, 6),
                event=m.event,
                trainer_bytes=round(m.trainer_bytes),
                communicator_bytes=max(round(m.communicator_bytes), 0),
                overhead_bytes=round(m.overhead_bytes),
            )
            for m in middle.timeline
        ],
    )


def _plan_notes(plan: Plan, classes: list[RankClass], schedules: list[Schedule]) -> list[str]:
    notes = []
    if all(s.communicators == 0 for s in schedules) and all(not c.communicators() for c in classes):
        notes.append(
            "every group has a single rank: there is no communicator to keep, so keeping gains nothing"
        )
    if any(s.first_step_s[0] > 0 for s in schedules):
        notes.append(
            "communicators are created again inside the next training step (first_step_s), outside the timers"
        )
    if plan.backup is Backup.RETAIN:
        notes.append(
            "the first switch allocates the pinned backup and is as slow as reload; the figures are later ones"
        )
    return notes


def interval(values: Array) -> Interval:
    """Mean and central interval of draws."""
    tail = (1 - LEVEL) / 2
    lo, hi = np.quantile(values, [tail, 1 - tail])
    mean = float(np.mean(values))
    return Interval(mean=mean, lo=min(float(lo), mean), hi=max(float(hi), mean), level=LEVEL)
