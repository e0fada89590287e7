"""How a phase ends the same way on all ranks: each does its part, keeps its error, and all agree."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from pitstop.plan import Plan
from pitstop_runtime.control import Control, Objection
from pitstop_runtime.errors import CanaryError, RankFailedError, UnsupportedDispositionError
from pitstop_runtime.groups.communicator import Rendezvous
from pitstop_runtime.lifecycle import Lifecycle

_log = logging.getLogger(__name__)

T = TypeVar("T")
_SHOWN_RANKS = 8

# What a plan alone can cause, and the baseline mends.
_MILD = (CanaryError, UnsupportedDispositionError)


class Protocol:
    """Agreement with its consequences: a rank that is lost, or an objection that is fatal, ends in FAILED.

    ``describe`` puts an error of this rank into words: where it happened, under which plan.
    """

    def __init__(
        self,
        control: Control,
        lifecycle: Lifecycle,
        rendezvous: Rendezvous,
        describe: Callable[[Exception], str],
    ) -> None:
        self._control = control
        self._lifecycle = lifecycle
        self._rendezvous = rendezvous
        self._describe = describe

    def attempt(self, action: Callable[[], None]) -> Exception | None:
        """Run this rank's part; an error is kept until all ranks know of it.

        Raises:
            RankFailedError: a rank did not come in time; the state is FAILED.
        """
        try:
            self.together(action)
        except RankFailedError:
            raise  # there is nobody left to agree with
        except Exception as error:
            text = self._describe(error)
            _log.error("%s", text)
            self._control.raise_alarm(text)
            return error
        return None

    def together(self, action: Callable[[], T]) -> T:
        """Run what ranks do together outside of an agreement.

        Raises:
            RankFailedError: a rank did not come in time; the state is FAILED.
        """
        try:
            return action()
        except RankFailedError as lost:
            self._lifecycle.fail(str(lost))
            raise

    def consult(
        self,
        what: str,
        error: Exception | None = None,
        *,
        plan: Plan | None = None,
        fatal: bool | None = None,
    ) -> Objection | None:
        """Wait for all ranks; returns the objection of the lowest one that has one.

        Args:
            what: what is agreed on.
            error: what went wrong on this rank.
            plan: has to be equal on all ranks.
            fatal: whether the error leaves no way on; by default, whether a plan alone could not have caused it.

        Raises:
            RankFailedError: a rank did not come in time; the state is FAILED.
        """
        text = None if error is None else self._describe(error)
        severe = not isinstance(error, _MILD) if fatal is None else fatal
        objection = self.together(lambda: self._control.agree(what, text, _fingerprint(plan), fatal=severe))
        self._rendezvous.begin_epoch(self._control.sequence)
        if objection is None:
            return None
        if objection.differs and plan is not None:
            objection = replace(objection, reason=self._who_wants_what(what, plan))
        _log.error("%s: %s (agreed over %s)", what, objection, self._control)
        return objection

    def _who_wants_what(self, what: str, plan: Plan) -> str:
        wish = f"{plan.name} (fingerprint {_fingerprint(plan):x})"
        wishes: dict[str, list[str]] = {}
        for each in self.together(lambda: self._control.union([f"{wish} on rank {self._control.rank}"])):
            wanted, rank = each.rsplit(" ", 1)
            wishes.setdefault(wanted, []).append(rank)
        shown = (f"{wanted} {', '.join(ranks[:_SHOWN_RANKS])}" for wanted, ranks in wishes.items())
        return f"{what}: the plan has to be the same on all ranks, but it is {'; '.join(shown)}"

    def require(self, what: str, error: Exception | None = None, plan: Plan | None = None) -> None:
        """Wait for all ranks, and end in FAILED if one objects.

        Raises:
            RankFailedError: a rank did not come in time, or another one objects.
            Exception: this rank's own error.
        """
        self.raise_if(self.consult(what, error, plan=plan, fatal=True), error)

    def raise_if(self, objection: Objection | None, error: Exception | None) -> None:
        """End in FAILED if there is an objection.

        Raises:
            RankFailedError: another rank objects; what went wrong here may follow from it, and is the cause.
            Exception: this rank's own error.
        """
        if objection is None:
            return
        self._lifecycle.fail(str(objection))
        if error is not None and objection.rank == self._control.rank:
            raise error
        raise RankFailedError(f"{objection}. Restart the job from its last checkpoint.") from error


def _fingerprint(plan: Plan | None) -> int:
    if plan is None:
        return 0
    return int.from_bytes(hashlib.sha256(plan.model_dump_json().encode()).digest()[:7])
