"""The table of failures: which component of which plan, what goes wrong there, on which rank.

No torch in here: the test reads the table, and ``failure_run`` plays it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pitstop.components import Component, Phase

WORLD_SIZE = 4
# Not rank 0, which hosts the rendezvous store, and not the lowest of its tensor-parallel group [2, 3].
VICTIM = 3

C, S, U, W = Component, Phase.SLEEP, Phase.UPDATE_WEIGHTS, Phase.WAKE_UP

# What each plan's switch goes through, in order, once the first one has gone the baseline's way.
POINTS: dict[str, tuple[tuple[Phase, Component], ...]] = {
    "reload": (
        (S, C.GROUP_RELEASE),
        (S, C.COOLDOWN),
        (S, C.CLEAR_MEMORY),
        (S, C.SAVER_PAUSE),
        (U, C.GROUP_RESTORE),
        (U, C.FIRST_COLLECTIVE),
        (U, C.WEIGHTS_GATHER),
        (U, C.GROUP_RELEASE),
        (U, C.COOLDOWN),
        (W, C.SAVER_RESUME),
        (W, C.GROUP_RESTORE),
        (W, C.FIRST_COLLECTIVE),
    ),
    "keep-window": (
        (S, C.CLEAR_MEMORY),
        (S, C.SAVER_PAUSE),
        (S, C.CANARY),
        (U, C.WEIGHTS_GATHER),
        (U, C.GROUP_RELEASE),
        (W, C.SAVER_RESUME),
        (W, C.GROUP_RESTORE),
        (W, C.FIRST_COLLECTIVE),
    ),
    "keep": (
        (S, C.CLEAR_MEMORY),
        (S, C.SAVER_PAUSE),
        (S, C.CANARY),
        (U, C.WEIGHTS_GATHER),
        (W, C.SAVER_RESUME),
    ),
    "lean": (
        (S, C.CLEAR_MEMORY),
        (S, C.SAVER_PAUSE),
        (S, C.CANARY),
        (U, C.WEIGHTS_GATHER),
        (W, C.SAVER_RESUME),
    ),
    # Released and rebuilt in a thread beside the saver's work.
    "lean-released": (
        (S, C.GROUP_RELEASE),
        (S, C.CLEAR_MEMORY),
        (S, C.SAVER_PAUSE),
        (S, C.CANARY),
        (U, C.WEIGHTS_GATHER),
        (W, C.GROUP_RESTORE),
        (W, C.FIRST_COLLECTIVE),
        (W, C.SAVER_RESUME),
    ),
    # As above, but buffers that the ranks copy from are there for the weight sync only.
    "lean-copies": (
        (S, C.GROUP_RELEASE),
        (S, C.CLEAR_MEMORY),
        (S, C.SAVER_PAUSE),
        (U, C.GROUP_RESTORE),
        (U, C.CANARY),
        (U, C.WEIGHTS_GATHER),
        (U, C.GROUP_RELEASE),
        (W, C.GROUP_RESTORE),
        (W, C.FIRST_COLLECTIVE),
        (W, C.SAVER_RESUME),
    ),
}
# Ranks that stall or die. Rank 0 hosts the rendezvous store; what ``lean-released`` and ``lean-copies`` do is alike but
# for the export, and so is what ``keep`` and ``lean`` do.
VICTIMS = {"reload": (VICTIM, 0), "lean-released": (0,)}
SAME = {"keep": "lean"}
CHECKED = (C.CANARY, C.FIRST_COLLECTIVE)
BESIDE = {
    (plan, *point)
    for plan in ("lean-released", "lean-copies")
    for point in ((S, C.GROUP_RELEASE), (W, C.GROUP_RESTORE), (W, C.FIRST_COLLECTIVE))
}


@dataclass(frozen=True)
class Cell:
    """One failure: ``how`` is ``raise``, ``stall``, ``kill`` or ``corrupt`` (one rank's part of a canary)."""

    plan: str
    phase: Phase
    component: Component
    how: str
    victim: int

    def __str__(self) -> str:
        return f"{self.plan}: {self.how} rank {self.victim} in {self.point}"

    @property
    def point(self) -> str:
        return f"{self.phase}/{self.component}"

    @property
    def lost(self) -> list[int]:
        """Ranks that never return. One that stalls in a thread beside its own finds out and ends like the others."""
        beside = (self.plan, self.phase, self.component) in BESIDE
        return [self.victim] if self.how == "kill" or (self.how == "stall" and not beside) else []

    @property
    def goes_on(self) -> bool:
        """Whether the run survives in the baseline plan: a failed weight sync, a failed canary after the pause."""
        if self.phase is U:
            return self.how in ("raise", "corrupt")
        return self.how == "corrupt" and self.phase is S


def all_cells(how: str) -> Iterator[Cell]:
    """All failures of one kind."""
    for plan, points in POINTS.items():
        victims = VICTIMS.get(plan, (VICTIM,)) if how in ("stall", "kill") else (VICTIM,)
        for phase, component in points:
            if plan not in SAME and (how != "corrupt" or component in CHECKED):
                yield from (Cell(plan, phase, component, how, victim) for victim in victims)
