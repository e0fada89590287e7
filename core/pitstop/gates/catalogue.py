"""All gates, in the order in which they are shown."""

from __future__ import annotations

from typing import Final

from pitstop.gates.communicators import COMMUNICATOR_GATES
from pitstop.gates.gate import Gate
from pitstop.gates.memory import MEMORY_GATES
from pitstop.gates.software import SOFTWARE_GATES
from pitstop.gates.trainer import TRAINER_GATES

GATES: Final[tuple[Gate, ...]] = (*TRAINER_GATES, *SOFTWARE_GATES, *COMMUNICATOR_GATES, *MEMORY_GATES)
GATES_BY_CODE: Final[dict[str, Gate]] = {gate.code: gate for gate in GATES}
