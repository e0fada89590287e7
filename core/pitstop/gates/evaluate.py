"""A plan held against the facts: what each gate says, and whether the plan may be carried out.

A closed gate refuses its plan anywhere. In a live trainer, doubt refuses too: a required gate that is not known to
be open keeps the trainer on the baseline. The baseline itself is never refused for doubt, since it is where every
doubt ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pitstop.gates.catalogue import GATES
from pitstop.gates.facts import Facts
from pitstop.gates.gate import Finding, Gate, GateVerdict, departs
from pitstop.plan import Plan


@dataclass(frozen=True, slots=True)
class GateResult:
    """What one gate says of the facts."""

    gate: Gate
    finding: Finding

    @property
    def code(self) -> str:
        """The gate's code."""
        return self.gate.code

    @property
    def closed(self) -> bool:
        """Whether the gate refuses the plan."""
        return self.finding.verdict is GateVerdict.CLOSED and self.gate.refuses

    @property
    def warned(self) -> bool:
        """Whether the gate is closed, but only warns."""
        return self.finding.verdict is GateVerdict.CLOSED and not self.gate.refuses

    @property
    def unknown(self) -> bool:
        """Whether the facts do not say."""
        return self.finding.verdict is GateVerdict.UNKNOWN

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON-ready values."""
        gate, finding = self.gate, self.finding
        return {
            "code": gate.code,
            "title": gate.title,
            "verdict": finding.verdict.value,
            "value": finding.value,
            "why": gate.why,
            "source": gate.source,
            "remedy": finding.remedy,
            "required": gate.required,
            "refuses": gate.refuses,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a plan may be carried out; ``str()`` of it names every gate in the way, for logs and errors."""

    plan: Plan
    results: tuple[GateResult, ...]
    live: bool

    @property
    def blocking(self) -> tuple[GateResult, ...]:
        """The gates in the way: closed ones and, in a live trainer, required ones that are not known to be open."""
        doubt_refuses = self.live and departs(self.plan)
        return tuple(
            result
            for result in self.results
            if result.closed or (doubt_refuses and result.unknown and result.gate.required)
        )

    @property
    def allowed(self) -> bool:
        """Whether nothing is in the way."""
        return not self.blocking

    @property
    def closed(self) -> tuple[GateResult, ...]:
        """Gates that refuse the plan."""
        return tuple(result for result in self.results if result.closed)

    @property
    def warned(self) -> tuple[GateResult, ...]:
        """Gates that warn of it."""
        return tuple(result for result in self.results if result.warned)

    @property
    def unknown(self) -> tuple[GateResult, ...]:
        """Gates that the facts do not decide."""
        return tuple(result for result in self.results if result.unknown)

    def __str__(self) -> str:
        if self.allowed:
            return f"{self.plan.name} may be carried out here"
        lines = (
            f"  - {each.code} ({each.finding.verdict.value}): {each.finding.value}. {each.finding.remedy} "
            f"[{each.gate.source}]"
            for each in self.blocking
        )
        return "\n".join([f"{self.plan.name} may not be carried out here", *lines])

    def as_dict(self) -> dict[str, Any]:
        """The verdict as JSON-ready values."""
        return {
            "plan": self.plan.name,
            "allowed": self.allowed,
            "closed": [result.code for result in self.closed],
            "warned": [result.code for result in self.warned],
            "unknown": [result.code for result in self.unknown],
            "gates": [result.as_dict() for result in self.results],
        }


def evaluate(plan: Plan, facts: Facts) -> tuple[GateResult, ...]:
    """What each gate that guards the plan says of the facts, in the catalogue's order."""
    return tuple(GateResult(gate, gate.check(facts)) for gate in GATES if gate.applies(plan))


def judge(plan: Plan, facts: Facts, *, live: bool = False) -> Verdict:
    """Whether a plan may be carried out; ``live``: in a trainer, where doubt refuses."""
    return Verdict(plan, evaluate(plan, facts), live)
