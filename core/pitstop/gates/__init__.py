"""Gates: the conditions under which a plan may be carried out, as data.

``facts_of`` says what a scenario tells, the runtime replaces what it can read in the trainer, ``judge`` holds a plan
against the facts. Each gate names what goes wrong otherwise, and where that is known from.
"""

from pitstop.gates.catalogue import GATES, GATES_BY_CODE
from pitstop.gates.evaluate import GateResult, Verdict, evaluate, judge
from pitstop.gates.facts import NO_SAVER, NOBODY, TORCH_MEMORY_SAVER, Facts, facts_of, relevant_environment
from pitstop.gates.gate import Finding, Gate, GateVerdict

__all__ = [
    "GATES",
    "GATES_BY_CODE",
    "NOBODY",
    "NO_SAVER",
    "TORCH_MEMORY_SAVER",
    "Facts",
    "Finding",
    "Gate",
    "GateResult",
    "GateVerdict",
    "Verdict",
    "evaluate",
    "facts_of",
    "judge",
    "relevant_environment",
]
