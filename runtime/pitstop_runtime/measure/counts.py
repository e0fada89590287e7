"""Live communicators, sockets and threads of this process: what grows if groups are not torn down well."""

from __future__ import annotations

import logging
from collections import deque
from itertools import pairwise
from pathlib import Path

from pitstop.telemetry import ProcessCounts

_log = logging.getLogger(__name__)

_CYCLES = 5
# A socket or thread more or less comes and goes with telemetry; a leak of groups adds some in every cycle.
_TOLERANCE = 2


def count(communicators: int) -> ProcessCounts:
    """Count now; zero where /proc does not exist."""
    return ProcessCounts(communicators=communicators, sockets=_sockets(), threads=_threads())


def _sockets() -> int:
    folder = Path("/proc/self/fd")
    found = 0
    for entry in folder.iterdir() if folder.exists() else ():
        try:
            found += str(entry.readlink()).startswith("socket:")
        except OSError:
            continue  # closed meanwhile
    return found


def _threads() -> int:
    folder = Path("/proc/self/task")
    return sum(1 for _ in folder.iterdir()) if folder.exists() else 0


class LeakWatch:
    """Alarms if a count rose in each of the last cycles.

    Returns nothing and raises nothing: a leak is a reason to tell somebody, not to end a run.
    """

    def __init__(self) -> None:
        self._last: deque[ProcessCounts] = deque(maxlen=_CYCLES + 1)

    def add(self, counts: ProcessCounts) -> list[str]:
        """Take the counts after a switch; returns an alarm for each count that keeps growing."""
        self._last.append(counts)
        alarms = []
        for name in ProcessCounts.model_fields:
            values = [getattr(each, name) for each in self._last]
            rises = all(b > a for a, b in pairwise(values))
            if len(values) > _CYCLES and rises and values[-1] - values[0] > _TOLERANCE:
                alarms.append(
                    f"{name} rose in each of the last {_CYCLES} switches, from {values[0]} to {values[-1]}: "
                    "something is not torn down. Look for groups made anew in each step."
                )
        for alarm in alarms:
            _log.error("%s", alarm)
        return alarms
