"""Which plan is in force: two stages up, one fall back down.

A plan that passed its gates is first only *eligible*: the switch goes the baseline's way. After one good weight
sync it is *ready* and in force. Any failure of the plan ends in the baseline, for the life of the process.
All ranks move together: callers agree before they call.
"""

from __future__ import annotations

import logging
from enum import StrEnum

from pitstop.plan import BASELINE, Plan

_log = logging.getLogger(__name__)


class Stage(StrEnum):
    """How far a plan has come."""

    ELIGIBLE = "eligible"
    READY = "ready"
    FALLEN_BACK = "fallen-back"


class Enabling:
    """The plan of one process and its stage."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.stage = Stage.READY if plan == BASELINE else Stage.ELIGIBLE
        self.reason: str | None = None
        self._proven = False

    @property
    def in_force(self) -> Plan:
        """What the next switch does.

        While eligible, groups share and are capped as planned - training sees that from its first step on -
        and are destroyed and rebuilt as in the baseline.
        """
        if self.stage is Stage.FALLEN_BACK:
            return BASELINE
        if self.stage is Stage.READY:
            return self.plan
        return BASELINE.model_copy(
            update={
                "share": self.plan.share,
                "cold_max_ctas": self.plan.cold_max_ctas,
                "hot_max_ctas": self.plan.hot_max_ctas,
            }
        )

    def prove(self) -> None:
        """A weight sync went well."""
        self._proven = True
        if self.stage is Stage.ELIGIBLE:
            self.stage = Stage.READY
            _log.info("plan %s is ready: a weight sync went well", self.plan.name)

    def change(self, plan: Plan) -> bool:
        """Take another plan, whose gates are open; refused after a fall-back. Returns whether it was taken."""
        if self.stage is Stage.FALLEN_BACK:
            return False
        self.plan = plan
        self.stage = Stage.READY if self._proven or plan == BASELINE else Stage.ELIGIBLE
        return True

    def fall_back(self, reason: str) -> None:
        """Give the plan up; only the first reason is kept."""
        if self.stage is not Stage.FALLEN_BACK:
            self.stage, self.reason = Stage.FALLEN_BACK, reason
            _log.error("plan %s is given up for the life of this process: %s", self.plan.name, reason)
