"""Which plan a process follows: gates, recommendations, and the stages of enabling, on all ranks alike."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from pitstop.gates import Facts, judge
from pitstop.plan import BASELINE, Plan
from pitstop_runtime.control import Control
from pitstop_runtime.enabling import Enabling, Stage
from pitstop_runtime.errors import GatesClosedError

if TYPE_CHECKING:  # it needs an HTTP client, which a trainer without a service may lack
    from pitstop_runtime.recommendation import Outcome, Recommendation

_log = logging.getLogger(__name__)


class Recommender(Protocol):
    """Says which plan is recommended now and hears what became of it: ``RecommendationClient`` does."""

    def current(self) -> Recommendation | None:
        """The newest recommendation that holds, at once."""

    def report(self, recommendation_id: str, outcome: Outcome | str, detail: str = "") -> None:
        """Take note, at once."""


class PlanChoice:
    """Judges plans by the facts of this process, with the other ranks.

    While a recommendation holds, its plan is followed instead of the process's own ``plan``. Only the recommender of
    rank 0 is asked; it is told of each recommendation that it was refused, applied (a whole switch went well under
    it) or failed.

    Raises:
        GatesClosedError: the gates of the baseline are closed, or the plan's are and ``strict`` is set.
    """

    def __init__(
        self, plan: Plan, facts: Facts, control: Control, recommender: Recommender | None, *, strict: bool
    ) -> None:
        self._own = plan
        self._facts = facts
        self._control = control
        self._recommender = recommender if control.rank == 0 else None
        self._followed: Recommendation | None = None
        self._begun: Plan | None = None
        self._settled: set[str] = set()
        self._require(BASELINE)
        self.enabling = Enabling(plan)
        if strict:
            self._require(plan)
        elif (why := self._why_not(plan)) is not None:
            self.enabling.fall_back(why)
        self._asks = control.any(self._recommender is not None, "whether plans are recommended")

    def change(self, plan: Plan) -> bool:
        """Take another plan as this process's own, if its gates are open on all ranks; returns whether it was taken."""
        if self.enabling.stage is Stage.FALLEN_BACK or self._try(plan) is not None:
            return False
        self._own = plan
        return True

    def begin_switch(self) -> None:
        """Take the plan that rank 0 is recommended now, or else one's own again."""
        if self._asks:
            newest = self._newest()
            if self.enabling.stage is not Stage.FALLEN_BACK:
                self._adopt(newest)
            elif newest is not None:
                self._settle(newest, "refused", f"fallen back to {BASELINE.name}: {self.enabling.reason}")
        self._begun = self.enabling.in_force

    def end_switch(self) -> None:
        """A whole switch went well."""
        if self._followed is not None and self._begun == self._followed.plan:
            self._settle(self._followed, "applied")

    def give_up(self, reason: str) -> None:
        """Fall back to the baseline for good."""
        self.enabling.fall_back(reason)
        self.end(reason)

    def end(self, reason: str) -> None:
        """The plan that is followed has failed."""
        failed, self._followed = self._followed, None
        if failed is not None:
            self._report(failed, "failed", reason)

    def _adopt(self, newest: Recommendation | None) -> None:
        wanted = self._own if newest is None else newest.plan
        # On other ranks than 0 both are their own plan; what counts is what rank 0 wants.
        differs = self._control.rank == 0 and wanted != self.enabling.plan
        why = None
        if self._control.any(differs, "whether another plan is recommended"):
            why = self._try(self._control.share(wanted))
        if newest is not None and why is not None:
            self._settle(newest, "refused", why)
        self._followed = newest if why is None else None

    def _newest(self) -> Recommendation | None:
        """What is recommended now, unless that was refused already; asked on rank 0 only."""
        try:
            newest = self._recommender.current() if self._recommender is not None else None
        except Exception as error:  # a recommendation is no reason to end a run
            _log.warning("no recommendation: %s", error)
            return None
        return None if newest is None or f"{newest.id} refused" in self._settled else newest

    def _settle(self, recommendation: Recommendation, outcome: str, detail: str = "") -> None:
        """Report an outcome once."""
        key = f"{recommendation.id} {outcome}"
        if key not in self._settled:
            self._settled.add(key)
            self._report(recommendation, outcome, detail)

    def _report(self, recommendation: Recommendation, outcome: str, detail: str) -> None:
        _log.info("recommended plan %s %s. %s", recommendation.plan.name, outcome, detail)
        try:
            if self._recommender is not None:
                self._recommender.report(recommendation.id, outcome, detail)
        except Exception as error:
            _log.warning("outcome of recommendation %s not reported: %s", recommendation.id, error)

    def _try(self, plan: Plan) -> str | None:
        """Take a plan; returns why not, if not."""
        why = self._why_not(plan)
        if why is None:
            self.enabling.change(plan)
        return why

    def _require(self, plan: Plan) -> None:
        why = self._why_not(plan)
        if why is not None:
            raise GatesClosedError(why)

    def _why_not(self, plan: Plan) -> str | None:
        """Why a plan may not be carried out; None if it may, on all ranks."""
        verdict = judge(plan, self._facts, live=True)
        closed = None if verdict.allowed else str(verdict)
        objection = self._control.agree(f"gates of {plan.name}", closed)
        if objection is None:
            return None
        _log.warning("%s", objection)
        return str(objection)
