"""Choose among predicted plans: within the memory budget, allowed by support, and worth it."""

from __future__ import annotations

from pitstop.components import COMPONENT_TEXT, Component
from pitstop.plan import BASELINE
from pitstop.prediction import PlanPrediction, Recommendation, Verdict
from pitstop.units import MIB, gib

NEUTRAL_BYTES = 128 * MIB
"""Memory held beyond the baseline's that nobody would miss: the report was turned down over 3.6 GiB and more."""

WORTH_OF_NEUTRAL = 0.8
"""Without a budget, a memory-neutral plan with this share of the best gain is preferred to the fastest plan."""

_GROUPS = {Component.GROUP_RELEASE, Component.GROUP_RESTORE, Component.FIRST_COLLECTIVE}


def recommend(plans: list[PlanPrediction], budget_bytes: int | None) -> Recommendation:
    """The plan with the least time per step (switch plus what it pushes into the next step) that fits.

    Without a budget, memory still counts: a plan that holds no more than the baseline is preferred if it has most of
    the best gain, because what the trainer holds is taken from the engine's KV cache.

    ``reload`` is recommended when nothing fits, or when no other plan's gain is clear of zero.
    """
    baseline = next((p for p in plans if p.plan == BASELINE.name), plans[0])
    allowed = [p for p in plans if p.support.verdict is not Verdict.REFUSED]
    fitting = [p for p in allowed if p.within_budget]
    if not fitting:
        why = "no plan fits the budget" if allowed else "the evidence supports no prediction here"
        return Recommendation(plan=baseline.plan, reasons=[f"{why}; stay with {baseline.plan}"])
    fastest = min(fitting, key=_cost)
    best = fastest if budget_bytes is not None else _preferred(fitting, fastest, baseline)
    if best is baseline or best.gain_s.lo <= 0:
        reason = f"no plan's gain is clear of zero (best: {best.plan}, {best.gain_s.mean:.2f} s)"
        return Recommendation(plan=baseline.plan, reasons=[reason])
    reasons = [
        f"saves {best.gain_s.mean:.2f} s per switch ({best.gain_s.lo:.2f} to {best.gain_s.hi:.2f}) "
        f"of {baseline.switch_s.mean:.2f} s"
    ]
    if best.first_step_s.mean + 0.05 < baseline.first_step_s.mean:
        saved = baseline.first_step_s.mean - best.first_step_s.mean
        reasons.append(
            f"and {saved:.2f} s of the next step, where lazy communicators are created unseen by the timers"
        )
    more = _held(best) - _held(baseline)
    reasons.append(f"holds {gib(more):+.2f} GiB per GPU against {baseline.plan}")
    if budget_bytes is not None:
        reasons.append(f"fits the budget of {gib(budget_bytes):.1f} GiB per GPU")
    if best.host_pinned_bytes.mean > 0:
        reasons.append(f"keeps {gib(best.host_pinned_bytes.mean):.0f} GiB of pinned host memory per node")
    if best.condition is not None:
        free = min((p for p in fitting if p.condition is None), key=_cost)
        reasons.append(
            f"first needs {best.condition}; until then use {free.plan} ({free.switch_s.mean:.1f} s)"
        )
    if fastest is not best:
        more = _held(fastest) - _held(best)
        reasons.append(
            f"{fastest.plan} would save {_cost(best) - _cost(fastest):.2f} s more and hold {gib(more):.2f} GiB more; "
            "give --budget-gib to allow it"
        )
    return Recommendation(plan=best.plan, reasons=reasons)


def _preferred(
    fitting: list[PlanPrediction], fastest: PlanPrediction, baseline: PlanPrediction
) -> PlanPrediction:
    neutral = [p for p in fitting if _held(p) - _held(baseline) <= NEUTRAL_BYTES]
    best = min(neutral, key=_cost, default=fastest)
    gain, most = _cost(baseline) - _cost(best), _cost(baseline) - _cost(fastest)
    return best if gain >= WORTH_OF_NEUTRAL * most else fastest


def _held(plan: PlanPrediction) -> float:
    return max(plan.held_at_sync_bytes.mean, plan.held_in_rollout_bytes.mean)


def _cost(plan: PlanPrediction) -> float:
    return plan.switch_s.mean + plan.first_step_s.mean


def dominant_component(baseline: PlanPrediction) -> str:
    """Say what most of the switch is, and how much of it is process groups and cooldown."""
    parts = {c: i.mean for c, i in baseline.components.items()}
    total = sum(parts.values())
    if total <= 0:
        return "there is nothing to switch"
    largest = max(parts, key=lambda c: parts[c])
    groups = sum(parts.get(c, 0.0) for c in _GROUPS) / total
    cooldown = parts.get(Component.COOLDOWN, 0.0) / total
    return (
        f"{parts[largest] / total:.0%} of the {baseline.plan} switch is {largest.value} ({COMPONENT_TEXT[largest]}); "
        f"process groups are {groups:.0%}, cooldown {cooldown:.0%}"
    )
