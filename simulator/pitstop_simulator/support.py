"""How far a scenario lies from the measured range, and what that does to each plan."""

from __future__ import annotations

from pitstop.gates.gate import survives
from pitstop.hardware import Link
from pitstop.plan import Disposition, Plan
from pitstop.prediction import Support, Verdict
from pitstop.scenario import Scenario

from .calibration import Calibration, Ranges
from .schedule import Schedule

_ORDER = [Verdict.INSIDE, Verdict.EDGE, Verdict.EXTRAPOLATED, Verdict.REFUSED]
_EDGE_FACTOR = 2.0
_SUSPEND_FROM_NCCL = (2, 29, 7)


def worst(*verdicts: Verdict) -> Verdict:
    """The least favourable of several verdicts."""
    return max(verdicts, key=_ORDER.index)


def judge(scenario: Scenario, calibration: Calibration, heaviest: Schedule, *, site: bool) -> Support:
    """Verdict on a scenario by its distance from the measured range, with a reason for every step outside."""
    ranges = calibration.ranges
    found: list[tuple[Verdict, str]] = []
    hardware = scenario.hardware
    if hardware.intra_node_link is Link.XGMI:
        reason = (
            f"{hardware.gpu} does not run NCCL; every measured row is of NVIDIA GPUs: "
            "measure one switch of `reload` there"
        )
        found.append((Verdict.REFUSED, reason))
    elif hardware.gpu not in ranges.gpus:
        known = ", ".join(ranges.gpus)
        own = (
            "; your own baseline fills most of that gap"
            if site
            else "; give your baseline log with --evidence"
        )
        found.append(
            (Verdict.EXTRAPOLATED, f"no component was measured on {hardware.gpu}, only on {known}{own}")
        )
    if hardware.nodes > ranges.nodes[1] == 1:
        # From one node to two, links, buffers and rendezvous change in kind, not in degree.
        reason = f"no communicator across nodes was measured; this scenario has {hardware.nodes} nodes"
        found.append((Verdict.EXTRAPOLATED, reason))
    else:
        _outside(found, "nodes", hardware.nodes, ranges.nodes)
    _outside(found, "world size", scenario.world_size, ranges.world_size)
    _outside(found, "ranks per GPU", hardware.ranks_per_gpu, ranges.ranks_per_gpu)
    if heaviest.communicators:
        _outside(found, "communicators per rank", heaviest.communicators, ranges.communicators)
    if not site:
        _outside(found, "saved bytes per rank", int(heaviest.saved_bytes), ranges.saved_bytes)
    verdict = worst(Verdict.INSIDE, *(v for v, _ in found))
    return Support(verdict=verdict, reasons=[reason for _, reason in found])


def _outside(found: list[tuple[Verdict, str]], what: str, value: int, span: tuple[int, int]) -> None:
    low, high = span
    if low <= value <= high:
        return
    near = low / _EDGE_FACTOR <= value <= high * _EDGE_FACTOR
    verdict = Verdict.EDGE if near else Verdict.EXTRAPOLATED
    found.append((verdict, f"{what} {value:,} is outside the measured {low:,} to {high:,}"))


def judge_plan(plan: Plan, scenario: Scenario, general: Support) -> Support:
    """Verdict on one plan: the scenario's, unless the plan itself cannot or must not be carried out there."""
    reasons = list(general.reasons)
    verdict = general.verdict
    if plan.training is Disposition.SUSPEND:
        nccl = scenario.versions.nccl
        version = _version(nccl)
        if version is None:
            verdict = worst(verdict, Verdict.EXTRAPOLATED)
            reasons.append(
                "suspend needs NCCL >= 2.29.7; the scenario does not say which NCCL it runs (versions.nccl)"
            )
        elif version < _SUSPEND_FROM_NCCL:
            verdict = Verdict.REFUSED
            reasons.append(f"suspend needs NCCL >= 2.29.7, the scenario runs {nccl}")
    return Support(verdict=verdict, reasons=reasons)


def condition_of(plan: Plan, scenario: Scenario) -> str | None:
    """What must be shown on the machine before the plan may be carried out there; None if nothing."""
    if survives(plan) and scenario.hardware.nodes > 1:
        return (
            "a cross-node canary on this hardware and NCCL: communicators kept across a pause failed between two nodes "
            "elsewhere (radixark/miles#806)"
        )
    return None


def _version(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split("+")[0].split(".")
    return tuple(int(p) for p in parts) if all(p.isdigit() for p in parts) else None


def version_notes(scenario: Scenario, ranges: Ranges) -> list[str]:
    """Where the scenario's versions differ from those of the evidence, or are unknown."""
    notes = []
    for name, measured in (("nccl", ranges.nccl), ("torch", ranges.torch)):
        value = getattr(scenario.versions, name)
        if value is None:
            notes.append(f"{name}: version not given; evidence was measured with {', '.join(measured)}")
        elif value not in measured:
            notes.append(f"{name}: {value} differs from the evidence's {', '.join(measured)}")
    return notes
