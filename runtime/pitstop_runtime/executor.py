"""Carries out what a plan says of communicators, phase by phase. Decides nothing and agrees on nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pitstop.components import Component, Phase
from pitstop.plan import Cooldown, Disposition, Plan
from pitstop_runtime.background import Background
from pitstop_runtime.canary import Canary
from pitstop_runtime.control import Control
from pitstop_runtime.errors import CanaryError, first_line
from pitstop_runtime.groups import Communicator, CommunicatorState, PeerCopies, Registry, Wiring, release
from pitstop_runtime.lifecycle import State
from pitstop_runtime.measure.spans import Spans
from pitstop_runtime.saver import Saver

_log = logging.getLogger(__name__)

_SLACK_S = 0.5
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds, and what belongs to the machine rather than to the plan.

    Attributes:
        timeout_s: longest wait for a release or a rebuild.
        canary_s: longest wait for a canary.
        cooldown_s: time between destroying groups and rebuilding them, for the ports to become free. Grows
            with the number of ranks (pytorch/pytorch#119196); zero is a decision of the caller.
        manage_world: whether the default group is destroyed and rebuilt too.
    """

    timeout_s: float = 120.0
    canary_s: float = 30.0
    cooldown_s: float = 2.0
    manage_world: bool = True

    @property
    def agreement_s(self) -> float:
        """Longest wait for other ranks to agree: longer than any that a rank may have before it comes there."""
        return self.timeout_s + self.canary_s


class Executor:
    """Acts on the communicators of one process; ``spans`` gives those of the switch under way."""

    def __init__(
        self,
        registry: Registry,
        control: Control,
        saver: Saver,
        limits: Limits,
        spans: Callable[[], Spans],
    ) -> None:
        self._registry = registry
        self._control = control
        self._saver = saver
        self._limits = limits
        # The executor gives up first, for it can say who did not come.
        registry.rendezvous.limit_s = limits.timeout_s + _SLACK_S
        self._spans = spans
        self._canary = Canary(limits.canary_s, control.is_lost)
        self._ready_at = 0.0  # until then, the ports of what was destroyed may be in use
        self._job: Background | None = None
        self._used: frozenset[str] = frozenset()
        self.busy_with = ""
        self._awaited: tuple[str, Sequence[int]] | None = None  # a meeting that is waited for, and its ranks

    # Sleep.

    def wire(self, plan: Plan) -> None:
        """Map groups to communicators as the plan says; destroys those that do not fit."""
        cool_down = partial(time.sleep, self._limits.cooldown_s)
        if self._registry.rewire(Wiring.of(plan, self._limits.manage_world), cool_down):
            self._prepare()

    def begin_sleep(self, plan: Plan) -> None:
        """Release or suspend what the plan does not keep; in the background if it says so."""
        self._compare_use()
        if plan.training is Disposition.DESTROY:
            self._begin(plan, Phase.SLEEP, lambda: self._release_all(plan))
        elif plan.training is Disposition.SUSPEND:
            self._begin(plan, Phase.SLEEP, self._suspend_all)

    def check_kept(self, phase: Phase) -> None:
        """Run the canary on each communicator that is alive.

        Raises:
            CanaryError: one does not work.
        """
        kept = [each for each in self.communicators() if each.state is CommunicatorState.LIVE and each.used]
        if self._job is not None:  # what is being released beside us is not there to be checked
            kept = [each for each in kept if each in self._registry.exports()]
        if kept:
            with self._spans().component(phase, Component.CANARY):
                self._run_canary(kept, "a canary")

    def join(self, phase: Phase) -> None:
        """Wait for what runs in the background: before the GPU is handed over.

        Raises:
            SwitchError: it did not end in time.
        """
        job, self._job = self._job, None
        if job is not None:
            with self._spans().component(phase, Component.GROUP_RELEASE):
                self._join(job)

    def paused_state(self) -> State:
        """What the communicators of training are, in the words of the life cycle."""
        states = {each.state for each in self._registry.communicators()}
        if CommunicatorState.LIVE in states:
            return State.PAUSED_LIVE
        if CommunicatorState.SUSPENDED in states:
            return State.PAUSED_SUSPENDED
        return State.PAUSED_RELEASED

    # Weight sync.

    def begin_sync(self) -> None:
        """Have communicators ready for the export."""
        exports = self._registry.exports()
        # After a fall-back they are there until the next sleep, but torn down.
        if exports and all(each.state is CommunicatorState.LIVE for each in exports):
            self._open_exports()
            return
        self._resume_all(Phase.UPDATE_WEIGHTS)
        if any(each.state is CommunicatorState.RELEASED for each in self._registry.communicators()):
            self.restore(Phase.UPDATE_WEIGHTS)

    def end_sync(self, plan: Plan) -> None:
        """Put communicators away again as the plan says."""
        phase = Phase.UPDATE_WEIGHTS
        self._registry.route_to_export(False)
        self._close_exports()
        if plan.training in (Disposition.DESTROY, Disposition.DESTROY_AFTER_SYNC):
            if any(each.state is CommunicatorState.LIVE for each in self._registry.communicators()):
                with self._spans().component(phase, Component.GROUP_RELEASE):
                    self._release_all(plan)
                self._pay_fixed(plan, phase)
        elif plan.training is Disposition.SUSPEND:
            with self._spans().component(phase, Component.GROUP_RELEASE):
                self._suspend_all()

    # Wake-up.

    def begin_wake(self, plan: Plan) -> None:
        """Start rebuilding beside the saver's resume, if the plan works in the background."""
        if plan.background_release:
            self._job = self._background(
                lambda: self.restore(Phase.WAKE_UP, overlapped=True), "rebuilding communicators"
            )

    def end_wake(self, plan: Plan) -> None:
        """Have all communicators live.

        Raises:
            SwitchError: that did not end in time.
            CanaryError: a rebuilt communicator does not work.
        """
        if plan.background_release:
            job, self._job = self._job, None
            if job is not None:
                with self._spans().component(Phase.WAKE_UP, Component.GROUP_RESTORE):
                    self._join(job)
            return
        self._resume_all(Phase.WAKE_UP)
        self.restore(Phase.WAKE_UP)

    # Both ways.

    def restore(self, phase: Phase, *, overlapped: bool = False) -> None:
        """Rebuild what is released and run a first collective on what was in use.

        Raises:
            SwitchError: a rebuild did not end in time: its members wait for one that does not come.
            CanaryError: a rebuilt communicator does not work.
        """
        released = [
            each for each in self._registry.communicators() if each.state is CommunicatorState.RELEASED
        ]
        if not released:
            return
        spans = self._spans()
        span = spans.overlapped if overlapped else spans.component
        wait_s = self._ready_at - time.monotonic()
        if wait_s > 0:
            with span(phase, Component.COOLDOWN):
                time.sleep(wait_s)
        with span(phase, Component.GROUP_RESTORE):
            self._bounded(lambda: self._build(released))
        with span(phase, Component.FIRST_COLLECTIVE):
            # NCCL connects within the first call, and waits there for members that do not come.
            used = [each for each in released if each.name in self._used]
            self._bounded(lambda: self._run_awaited(used, "first collectives"))

    def tear_down(self) -> None:
        """Destroy everything, whatever state it is in, waiting for nobody: after a failure."""
        self._registry.route_to_export(False)
        job, self._job = self._job, None
        if job is not None:
            try:
                self._join(job)
            except Exception as error:  # all ranks have to get here, and what it worked on ends below anyway
                _log.warning("given up too: %s", first_line(error))
        self.abort()
        release(self.communicators())
        self._ready_at = time.monotonic() + self._limits.cooldown_s

    def abort(self) -> None:
        """Break off all collectives that are under way."""
        for each in self.communicators():
            each.abort()

    def live_count(self) -> int:
        """Communicators that hold something."""
        return sum(1 for each in self.communicators() if each.used)

    def communicators(self) -> list[Communicator]:
        """All, of training and of export."""
        return [*self._registry.communicators(), *self._registry.exports()]

    def _prepare(self) -> None:
        """Buffers for canaries, and exports tried out, while memory is free."""
        self._bounded(self._try_exports)

    def _try_exports(self) -> None:
        exports = self._registry.exports()
        self._open(exports)
        self._run_awaited(exports, "a canary of exports")
        self._close(exports)

    def _open_exports(self) -> None:
        """Have what gathers the weights ready; copies are checked now, what was kept has been already."""
        opened = [each for each in self._registry.exports() if not each.used]
        if opened:
            with self._spans().component(Phase.UPDATE_WEIGHTS, Component.GROUP_RESTORE):
                self._bounded(lambda: self._open(opened))
            with self._spans().component(Phase.UPDATE_WEIGHTS, Component.CANARY):
                # Copies wait for one another within the call, as long as collectives of the group may.
                limit_s = self._limits.canary_s + _SLACK_S
                self._bounded(lambda: self._run_awaited(opened, "a canary of exports"), limit_s)
        self._registry.route_to_export(True)

    def _open(self, exports: Sequence[Communicator]) -> None:
        with self._saver.disabled():
            for each in exports:
                # Members exchange what they have over torch's connection to the store. A wait for one that does not
                # come could not be ended there, and would keep the fall-back from rebuilding anything.
                self._await(f"opening {each}", each.ranks)
                self._control.meet(f"opening {each}", each.ranks)
                each.open()

    def _close_exports(self) -> None:
        opened = [each for each in self._registry.exports() if isinstance(each, PeerCopies) and each.used]
        if opened:
            with self._spans().component(Phase.UPDATE_WEIGHTS, Component.GROUP_RELEASE):
                self._bounded(lambda: self._close(opened))

    def _close(self, exports: Sequence[Communicator]) -> None:
        for each in exports:
            self._await(f"closing {each}", each.ranks)
            self._control.come(f"closing {each}")
            each.close()

    def _run_awaited(self, communicators: Sequence[Communicator], what: str) -> None:
        """Run the canary where the calls themselves may wait for members that do not come: within a time limit."""
        shown = ", ".join(map(str, communicators[:_SHOWN]))
        more = f" and {len(communicators) - _SHOWN} more" if len(communicators) > _SHOWN else ""
        self._await(what, _members(communicators), f"{what} on {shown}{more}")
        self._run_canary(communicators, what)

    def _run_canary(self, communicators: Sequence[Communicator], what: str) -> None:
        self._control.come(what)
        try:
            with self._saver.disabled():
                self._canary.prepare(self.communicators())
                self._canary.run(communicators)
        except CanaryError as error:
            absent = self._control.not_come(what, _members(communicators))
            if not absent:
                raise
            raise CanaryError(f"{error}; {absent} did not come to it") from error

    def _compare_use(self) -> None:
        """Learn which communicators any member has used, where one of them has news."""
        used = frozenset(
            each.name for each in self._registry.communicators() if each.used or each.restore_use
        )
        if self._control.any(used != self._used, "comparing communicators"):
            self._used = frozenset(self._control.union(sorted(used | self._used)))

    def _begin(self, plan: Plan, phase: Phase, action: Callable[[], None]) -> None:
        if plan.background_release:

            def beside() -> None:
                with self._spans().overlapped(phase, Component.GROUP_RELEASE):
                    action()

            self._job = self._background(beside, "releasing communicators")
            return
        with self._spans().component(phase, Component.GROUP_RELEASE):
            action()
        if plan.training is Disposition.DESTROY:
            self._pay_fixed(plan, phase)

    def _pay_fixed(self, plan: Plan, phase: Phase) -> None:
        if plan.cooldown is Cooldown.FIXED:
            with self._spans().component(phase, Component.COOLDOWN):
                time.sleep(max(0.0, self._ready_at - time.monotonic()))

    def _release_all(self, plan: Plan) -> None:
        # The baseline and the report's plans destroy one after the other, as frameworks do: what they are
        # compared with must not be faster than what users have.
        release(self._registry.communicators(), side_by_side=plan.background_release)
        self._ready_at = time.monotonic() + self._limits.cooldown_s

    def _suspend_all(self) -> None:
        for each in self._registry.communicators():
            self.busy_with = f"suspending {each}"
            each.suspend()

    def _resume_all(self, phase: Phase) -> None:
        suspended = [
            each for each in self._registry.communicators() if each.state is CommunicatorState.SUSPENDED
        ]
        if suspended:
            with self._spans().component(phase, Component.GROUP_RESTORE):
                for each in suspended:
                    self.busy_with = f"resuming {each}"
                    each.resume()

    def _build(self, communicators: Sequence[Communicator]) -> None:
        agreed = self._control.sequence
        for each in communicators:
            self._await(each.name, each.ranks, f"rebuilding {each}")
            self._control.come(each.name)
            each.build()
            if self._control.sequence != agreed:
                return  # given up long ago, and another thread may be at it again
            if each.name in self._used:
                each.connect()

    def _await(self, meeting: str, ranks: Sequence[int], what: str = "") -> None:
        """Keep what is begun now, and who has to come to it, in case that time runs out."""
        self.busy_with, self._awaited = what or meeting, (meeting, ranks)

    def _bounded(self, action: Callable[[], None], limit_s: float | None = None) -> None:
        self._background(action, "working on communicators", limit_s).join()

    def _background(self, action: Callable[[], None], what: str, limit_s: float | None = None) -> Background:
        self.busy_with, self._awaited = what, None
        return Background(
            action, limit_s or self._limits.timeout_s, self._describe_delay, self._control.is_lost
        )

    def _join(self, job: Background) -> None:
        job.join()
        self._control.note("", beside=True)

    def _describe_delay(self) -> str:
        """What is under way, and who is waited for."""
        what = self.busy_with
        absent = self._control.not_come(*self._awaited) if self._awaited else ""
        return f"{what}, to which {absent} did not come," if absent else what


def _members(communicators: Sequence[Communicator]) -> list[int]:
    return sorted({rank for each in communicators for rank in each.ranks})
