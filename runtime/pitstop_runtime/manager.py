"""``SwitchManager``: the few lines that a trainer writes.

    import pitstop_runtime.groups                       # registers the backend
    torch.distributed.init_process_group("pitstop")
    ...                                                 # Megatron makes its groups, model and optimizer
    manager = SwitchManager("lean", saver=TorchMemorySaver(), facts=Facts(role="actor", colocated=True, ...))
    for step in range(steps):
        train(step)
        with manager.sleeping(step):                    # sleep on entry, wake_up on exit
            engine.resume_weights()
            manager.update_weights(lambda sync: export_to(engine, sync))
            engine.resume_cache()
            samples = engine.rollout()
            engine.release()

Every phase has one form: all ranks agree on what to do, each does its part, and all agree that it went well.
A rank that fails says so in the second agreement; one that does not come is named when time is up. What a plan
alone has caused - a canary that fails, a communicator that cannot be suspended, a weight sync that raises -
ends in the baseline plan, on all ranks, for the life of the process. What leaves no way on is FAILED.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from pitstop.components import Component, Phase
from pitstop.gates import Facts
from pitstop.plan import Plan, named_plan
from pitstop.telemetry import StepRecord
from pitstop_runtime.background import is_beside
from pitstop_runtime.choice import PlanChoice, Recommender
from pitstop_runtime.control import Control, Objection
from pitstop_runtime.enabling import Enabling, Stage
from pitstop_runtime.errors import ForbiddenTransitionError, RankFailedError
from pitstop_runtime.executor import Executor, Limits
from pitstop_runtime.facts import live_facts
from pitstop_runtime.groups import Registry
from pitstop_runtime.groups import registry as process_registry
from pitstop_runtime.handover import HandOver
from pitstop_runtime.lifecycle import Entry, Lifecycle, State
from pitstop_runtime.measure.counts import LeakWatch, count
from pitstop_runtime.measure.memory import sample
from pitstop_runtime.measure.reduction import RankStep, Reduction
from pitstop_runtime.measure.spans import Observer, Spans, place_of
from pitstop_runtime.preflight import check_ipc
from pitstop_runtime.protocol import Protocol
from pitstop_runtime.saver import NullSaver, ParameterCheck, Recomputed, Saver
from pitstop_runtime.sync import WeightSync

_log = logging.getLogger(__name__)

_RECORD_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What a trainer decides beside the plan.

    Attributes:
        limits: time limits, the cooldown, and whether the default group is managed.
        clear_memory: whether ``sleep`` begins with garbage collection and emptying torch's cache.
        full_collection_every: switches between full garbage collections; the others collect young objects.
        engine_bytes: device memory per GPU that must be free when ``sleep`` ends; not checked if None.
        require_confirmation: whether each weight sync has to prove that the engine has the new weights.
        strict_gates: raise if the plan's gates are closed, instead of going on with the baseline.
    """

    limits: Limits = field(default_factory=Limits)
    clear_memory: bool = True
    full_collection_every: int = 10
    engine_bytes: int | None = None
    require_confirmation: bool = False
    strict_gates: bool = False


class SwitchManager:
    """Carries out switches in one trainer process. Made on all ranks at the same point, after all groups.

    Args:
        plan: a named plan or one of your own; equal on all ranks.
        saver: what pauses the trainer's memory.
        facts: what a process cannot see of itself (role, whether it is colocated ...); the rest is read here.
        settings: times and habits.
        recomputed: tensors that need not survive the pause.
        check: checksums of parameters across the pause.
        on_record: called on rank 0, in a thread, with the record of each switch;
            ``TelemetryClient.submit`` is made for it.
        recommendations: a ``RecommendationClient``. That of rank 0 is asked before each switch; while it has a
            recommendation, that plan is followed, and it is told what became of it.
        observer: called as each component begins.

    Raises:
        GatesClosedError: the gates of the baseline are closed, or those of the plan and gates are strict.
        RankFailedError: not all ranks came.
    """

    def __init__(
        self,
        plan: str | Plan,
        *,
        saver: Saver | None = None,
        facts: Facts | None = None,
        settings: Settings | None = None,
        recomputed: Recomputed | None = None,
        check: ParameterCheck | None = None,
        on_record: Callable[[StepRecord], None] | None = None,
        recommendations: Recommender | None = None,
        observer: Observer | None = None,
        registry: Registry = process_registry,
    ) -> None:
        self.lifecycle = Lifecycle()
        self.settings = settings = settings or Settings()
        self._saver: Saver = saver or NullSaver()
        self._recomputed = recomputed or Recomputed()
        self._check = check
        self._observer = observer
        self._leaks = LeakWatch()
        self._steps = 0
        self._sleeps = 0
        self._spans = self._new_spans()
        self._step = RankStep(step=0, plan="")
        self._control = Control(settings.limits.agreement_s)
        with self._control.naming_the_lost("making the manager"):
            self._reduction = Reduction(_RECORD_TIMEOUT_S, on_record, settings.limits.agreement_s)
        self._executor = Executor(registry, self._control, self._saver, settings.limits, lambda: self._spans)
        self._protocol = Protocol(self._control, self.lifecycle, registry.rendezvous, self._describe)
        self._hand_over = HandOver(self._control, self._saver)
        seen = live_facts(facts or Facts(), registry, self._control, self._saver)
        wanted = named_plan(plan) if isinstance(plan, str) else plan
        self._choice = PlanChoice(wanted, seen, self._control, recommendations, strict=settings.strict_gates)
        self._protocol.require("making the manager", plan=self.plan)
        error = self._protocol.attempt(lambda: self._set_up(seen))
        self._protocol.require("making the manager", error)

    @property
    def enabling(self) -> Enabling:
        """How far the plan has come, and why it was given up, if so."""
        return self._choice.enabling

    @property
    def plan(self) -> Plan:
        """The plan that the next switch carries out."""
        return self.enabling.in_force

    @property
    def state(self) -> State:
        """Where the trainer is in the cycle."""
        return self.lifecycle.state

    # The switch.

    def sleep(self, step: int | None = None) -> None:
        """Let go of the GPU: after this, the engine may take its memory.

        Raises:
            ForbiddenTransitionError: not now.
            RankFailedError: a rank failed or did not come; the state is FAILED.
            HandOverError: the memory promised to the engine is not free; call ``wake_up``.
        """
        with self.lifecycle.entry(Entry.SLEEP):
            self._begin(step)
            plan = self.plan
            with self._spans.phase(Phase.SLEEP):
                self._protocol.require("sleep", plan=plan)
                error = self._protocol.attempt(lambda: self._fall_asleep(plan))
                objection = self._protocol.consult("end of sleep", error)
                if objection is not None and not objection.fatal:
                    self._give_up(objection)
                    error = self._protocol.attempt(self._pause_if_needed)
                    objection = self._protocol.consult("end of sleep, as the baseline", error, fatal=True)
                self._protocol.raise_if(objection, error)
            self._step.at_sync = sample(self._executor.communicators())
            self.lifecycle.become(self._executor.paused_state())
            self._protocol.together(lambda: self._hand_over.to_engine(self.settings.engine_bytes))

    def update_weights(self, export: Callable[[WeightSync], Any]) -> None:
        """Run the trainer's export with communicators ready, guarded: if it raises anywhere, groups are torn down.

        ``export`` gets a ``WeightSync`` with which it times its components and confirms what the engine has.

        Raises:
            Exception: whatever ``export`` raised on this rank.
            RankFailedError: it failed on another rank. In both cases the state allows another attempt, which
                goes the baseline's way.
        """
        with self.lifecycle.entry(Entry.UPDATE_WEIGHTS):
            plan, paused = self.plan, self.state.is_paused
            if not paused:  # before the first sleep: not part of a switch
                self._spans = self._new_spans()
            with self._spans.phase(Phase.UPDATE_WEIGHTS):
                self._protocol.require("update_weights", plan=plan)
                error = self._protocol.attempt(lambda: self._sync(plan, export, paused=paused))
                # An export that failed is no reason to give the run up.
                objection = self._protocol.consult("end of update_weights", error, fatal=False)
                if objection is not None:
                    self._give_up(objection)
                    if not paused:
                        again = self._protocol.attempt(lambda: self._executor.restore(Phase.UPDATE_WEIGHTS))
                        self._protocol.require("rebuilding after a failed sync", again)
            if paused:
                self.lifecycle.become(self._executor.paused_state())
            if error is not None:
                raise error
            if objection is not None:
                raise RankFailedError(f"the weight sync failed on another rank. {objection}")
            self.enabling.prove()
            self._step.in_rollout = sample(self._executor.communicators())

    def wake_up(self) -> None:
        """Take the GPU back: after this, training goes on as if nothing had happened.

        Raises:
            ForbiddenTransitionError: not now.
            HandOverError: the engine still holds memory that the trainer needs. Nothing was done: call again.
            RankFailedError: a rank failed or did not come; the state is FAILED.
        """
        with self.lifecycle.entry(Entry.WAKE_UP):
            plan = self.plan
            with self._spans.phase(Phase.WAKE_UP):
                self._protocol.require("wake_up", plan=plan)
                self._protocol.together(self._hand_over.to_trainer)
                error = self._protocol.attempt(lambda: self._wake(plan))
                self._protocol.require("end of wake_up", error)
            self.lifecycle.become(State.ACTIVE)
            self._choice.end_switch()
            self._record()

    @contextmanager
    def sleeping(self, step: int | None = None) -> Iterator[SwitchManager]:
        """``sleep`` on entry, ``wake_up`` on exit; an exception of the body passes and leaves the trainer asleep."""
        self.sleep(step)
        yield self
        self.wake_up()

    # The other entry points.

    @contextmanager
    def training(self) -> Iterator[None]:
        """Announce a training step: refused while memory is paused."""
        with self.lifecycle.entry(Entry.TRAIN):
            yield

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Announce a checkpoint: refused while memory is paused."""
        with self.lifecycle.entry(Entry.SAVE):
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Announce an evaluation: refused while memory is paused."""
        with self.lifecycle.entry(Entry.EVAL):
            yield

    def shutdown(self) -> None:
        """End: send what was measured, and leave the groups to torch. From any state, and again, harmless."""
        with self.lifecycle.entry(Entry.SHUTDOWN):
            if self.state is State.FAILED:
                self._choice.end(self.lifecycle.failure or "")
            if self.state is not State.CLOSED:
                self._reduction.close(self.settings.limits.timeout_s if self.state is State.ACTIVE else 1.0)
                self._control.close()
            self.lifecycle.become(State.CLOSED)

    def change_plan(self, plan: Plan) -> bool:
        """Take another plan from the next switch on, if its gates are open; the same on all ranks.

        Returns whether it was taken; after a fall-back none is.

        Raises:
            ForbiddenTransitionError: a switch is under way, or the manager cannot go on.
            RankFailedError: a rank did not come; the state is FAILED.
        """
        if self.state is not State.ACTIVE:
            raise ForbiddenTransitionError(
                f"change_plan() is not allowed now: the state is {self.state}. Call it between wake_up() and sleep()."
            )
        return self._protocol.together(lambda: self._choice.change(plan))

    # What the phases do on this rank.

    def _set_up(self, facts: Facts) -> None:
        if facts.weight_transfer == "ipc":
            check_ipc(self._saver)
        self._executor.wire(self.plan)

    def _fall_asleep(self, plan: Plan) -> None:
        self._executor.wire(plan)
        self._executor.begin_sleep(plan)  # first, for what it does in the background takes longest
        with self._spans.component(Phase.SLEEP, Component.CLEAR_MEMORY):
            self._clear_memory()
        if self._check is not None:
            self._check.take()
        self._saver.set_backup(plan.backup)
        self._pause_if_needed()
        if plan.canary:
            self._executor.check_kept(Phase.SLEEP)
        self._executor.join(Phase.SLEEP)

    def _clear_memory(self) -> None:
        self._recomputed.release()
        if not self.settings.clear_memory:
            return
        # A full collection walks every object of the trainer's and takes longer than the rest of a lean switch.
        self._sleeps += 1
        full = self._sleeps % self.settings.full_collection_every == 1
        gc.collect() if full or self.settings.full_collection_every == 1 else gc.collect(1)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _pause_if_needed(self) -> None:
        if not self._saver.paused:
            with self._spans.component(Phase.SLEEP, Component.SAVER_PAUSE):
                self._saver.pause()
        self._step.pinned = self._saver.pinned_bytes()

    def _sync(self, plan: Plan, export: Callable[[WeightSync], Any], *, paused: bool) -> None:
        sync = WeightSync(self._spans)
        if paused:
            self._executor.begin_sync()
        with self._control.watch(self._on_alarm):
            export(sync)
        if self.settings.require_confirmation:
            sync.require_confirmation()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # nothing of the export may be under way when groups are released
        if paused:
            self._executor.end_sync(plan)

    def _wake(self, plan: Plan) -> None:
        self._executor.begin_wake(plan)
        with self._spans.component(Phase.WAKE_UP, Component.SAVER_RESUME):
            self._saver.resume()
        self._executor.end_wake(plan)
        self._recomputed.restore()
        if self._check is not None:
            self._check.verify()

    def _give_up(self, objection: Objection) -> None:
        """The baseline takes over, on all ranks."""
        self._choice.give_up(str(objection))
        self._step.fallback = str(objection)[:2000]
        self._executor.tear_down()

    def _on_alarm(self, text: str) -> None:
        if not text.startswith(f"rank {self._control.rank}:"):
            _log.error("another rank gave the weight sync up (%s): breaking off what is under way", text)
            self._executor.abort()

    def _describe(self, error: Exception) -> str:
        """What happened, where: enough to file a bug."""
        at = self._spans.now
        where = place_of(error) or (f"{at[0]}/{at[1]}" if at else "between components")
        return (
            f"{type(error).__name__} on rank {self._control.rank} in {where} (plan {self._step.plan}, "
            f"switch {self._steps}): {error}"
        )

    # Before and after.

    def _begin(self, step: int | None) -> None:
        self._protocol.together(self._choice.begin_switch)
        self._steps = self._steps + 1 if step is None else step
        self._spans = self._new_spans()
        self._step = RankStep(step=self._steps, plan=self.plan.name, phases=self._spans.phases)
        if self.enabling.stage is Stage.FALLEN_BACK:
            self._step.fallback = self.enabling.reason

    def _record(self) -> None:
        self._step.counts = count(self._executor.live_count())
        self._leaks.add(self._step.counts)
        self._reduction.submit(self._step)

    def _new_spans(self) -> Spans:
        synchronize = torch.cuda.synchronize if torch.cuda.is_available() else _nothing
        return Spans(synchronize, self._observe)

    def _observe(self, phase: Phase, component: Component) -> None:
        self._control.note(f"{phase}/{component}", beside=is_beside())
        if self._observer is not None:
            self._observer(phase, component)


def _nothing() -> None:
    """There is no device to wait for."""
