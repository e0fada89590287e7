"""How a phase ends the same way on all ranks: each does its part, keeps its error, and all agree."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

from pitstop.plan import Plan
from pitstop_runtime.control import Control, Objection
from pitstop_runtime.errors import CanaryError, RankFailedError, UnsupportedDispositionError
from pitstop_runtime.groups.communicator import Rendezvous
from pitstop_runtime.lifecycle import Lifecycle

_log = logging.getLogger(__name__)

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
        """Run this rank's part; an error is kept until all ranks know of it."""
        try:
            action()
        except Exception as error:
            _log.error("%s", self._describe(error))
            return error
        return None

    def consult(
        self,
        what: str,
        error: Exception | None = None,
        *,
        plan: Plan | None = None,
        fatal: bool | None = None,
        blame: str | None = None,
    ) -> Objection | None:
        """Wait for all ranks; returns the objection of the lowest one that has one.

        Args:
            what: what is agreed on.
            error: what went wrong on this rank.
            plan: has to be equal on all ranks.
            fatal: whether the error leaves no way on; by default, whether a plan alone could not have caused it.
            blame: says instead of the error what is behind it.

        Raises:
            RankFailedError: a rank did not come in time; the state is FAILED.
        """
        text = None if error is None else blame or self._describe(error)
        severe = not isinstance(error, _MILD) if fatal is None else fatal
        try:
            objection = self._control.agree(what, text, _fingerprint(plan), fatal=severe)
        except RankFailedError as lost:
            # What this rank knows itself comes first: it may be why the others did not come.
            reason = str(lost) if text is None else f"{text}; {lost}"
            self._lifecycle.fail(reason)
            _log.error("%s", reason)
            raise RankFailedError(reason) from (error or lost)
        self._rendezvous.begin_epoch(self._control.sequence)
        return objection

    def require(self, what: str, error: Exception | None = None, plan: Plan | None = None) -> None:
        """Wait for all ranks, and end in FAILED if one objects.

        Raises:
            RankFailedError: a rank did not come in time, or objects.
            Exception: this rank's own error.
        """
        self.raise_if(self.consult(what, error, plan=plan, fatal=True), error)

    def raise_if(self, objection: Objection | None, error: Exception | None) -> None:
        """End in FAILED if there is an objection.

        Raises:
            RankFailedError: another rank objects.
            Exception: this rank's own error.
        """
        if objection is None:
            return
        self._lifecycle.fail(str(objection))
        if error is not None:
            raise error
        raise RankFailedError(f"{objection}. Restart the job from its last checkpoint.")


def _fingerprint(plan: Plan | None) -> int:
    if plan is None:
        return 0
    return int.from_bytes(hashlib.sha256(plan.model_dump_json().encode()).digest()[:7])
