"""Which plan a process follows: gates, recommendations, and the stages of enabling, on all ranks alike."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pitstop.gates import Facts, judge
from pitstop.plan import BASELINE, Plan
from pitstop_runtime.control import Control
from pitstop_runtime.enabling import Enabling
from pitstop_runtime.errors import GatesClosedError

_log = logging.getLogger(__name__)


class PlanChoice:
    """Judges plans by the facts of this process, with the other ranks.

    Raises:
        GatesClosedError: the gates of the baseline are closed, or the plan's are and ``strict`` is set.
    """

    def __init__(
        self,
        plan: Plan,
        facts: Facts,
        control: Control,
        next_plan: Callable[[], Plan | None] | None,
        *,
        strict: bool,
    ) -> None:
        self._facts = facts
        self._control = control
        self._next_plan = next_plan
        self._require(BASELINE)
        self.enabling = Enabling(plan)
        if strict:
            self._require(plan)
        elif (why := self._why_not(plan)) is not None:
            self.enabling.fall_back(why)

    def change(self, plan: Plan) -> bool:
        """Take another plan, if its gates are open on all ranks; returns whether it was taken."""
        return self._why_not(plan) is None and self.enabling.change(plan)

    def adopt(self) -> None:
        """Take the plan that rank 0 was recommended, if there is one."""
        if self._next_plan is None:
            return
        plan = self._control.share(self._next_plan() if self._control.rank == 0 else None)
        if plan is not None and plan != self.enabling.plan:
            self.change(plan)

    def _require(self, plan: Plan) -> None:
        why = self._why_not(plan)
        if why is not None:
            raise GatesClosedError(why)

    def _why_not(self, plan: Plan) -> str | None:
        """Why a plan may not be carried out; None if it may, on all ranks."""
        verdict = judge(plan, self._facts, live=True)
        if not self._control.any(not verdict.allowed, f"gates of {plan.name}"):
            return None
        why = str(verdict) if not verdict.allowed else f"{plan.name}: gates are closed on another rank"
        _log.warning("%s", why)
        return why
