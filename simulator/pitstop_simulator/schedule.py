"""What a class of ranks does in a switch under a plan, as an ordered list of operations per phase."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pitstop.components import Component, Phase
from pitstop.plan import Cooldown, Disposition, Export, Plan
from pitstop.scenario import GroupCreation

from .calibration import WAITS, Array
from .costs import COPIES_PART_BYTES, PROXY_POLL_S, ClassCosts, Communicator, SiteFactors


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of a phase. Arrays have shape (draws,).

    ``store``: served by the rendezvous store, one class after the other. ``background``: runs beside the following
    operations and is joined at the end of the phase; ``driver``: needs the driver, which one operation of a process
    holds at a time. ``joins``: no rank goes on before all have arrived. ``owes_cooldown``: starts the cooldown's clock;
    ``awaits_cooldown``: waits until it has run off. Byte changes are per rank.
    """

    component: Component
    seconds: Array
    store: bool = False
    background: bool = False
    driver: bool = False
    joins: bool = False
    owes_cooldown: bool = False
    awaits_cooldown: bool = False
    trainer_bytes: float = 0.0
    communicator_bytes: Array | None = None

    def is_idle(self, draw: int) -> bool:
        """Whether it takes no time, waits for nobody and changes nothing."""
        waits = self.joins or self.owes_cooldown or self.awaits_cooldown
        changes = self.trainer_bytes != 0 or self.communicator_bytes is not None
        return not waits and not changes and float(self.seconds[draw]) == 0.0


@dataclass(slots=True)
class Schedule:
    """All operations of one class under one plan, with its starting bytes and what is left for the next step."""

    ranks: int
    start_communicator_bytes: Array
    saved_bytes: float
    overhead_bytes: Array
    communicators: int
    first_step_s: Array
    phases: dict[Phase, list[Operation]] = field(default_factory=dict)


def build_schedule(costs: ClassCosts, plan: Plan, factors: SiteFactors) -> Schedule:
    """The operations of one class under ``plan``, after the first few switches (steady state)."""
    parts = _Parts(costs, plan)
    trainer = costs.scenario.trainer
    lazy = trainer.group_creation is GroupCreation.LAZY
    live = costs.live(plan)
    export = costs.export_only(plan)
    gathering = export or [c for c in live if c.in_export]
    destroys = plan.training in (Disposition.DESTROY, Disposition.DESTROY_AFTER_SYNC)
    # Destroyed lazy communicators come back only with their next use, so training has those that a step uses.
    training = [c for c in live if c.in_step] if lazy and destroys else live
    eager = [] if lazy else live
    pause = Operation(
        Component.SAVER_PAUSE,
        costs.pause_s(plan.backup, factors),
        driver=True,
        trainer_bytes=-float(costs.saved_bytes),
    )
    resume = Operation(
        Component.SAVER_RESUME,
        costs.resume_s(plan.backup, factors),
        driver=True,
        trainer_bytes=float(costs.saved_bytes),
    )
    sync = [
        Operation(Component.WEIGHTS_GATHER, parts.gather_s(bool(export)), joins=True),
        Operation(Component.WEIGHTS_TRANSFER, costs.transfer_s()),
        Operation(Component.ENGINE_LOAD, costs.load_s(factors)),
    ]
    sleep = [Operation(Component.CLEAR_MEMORY, costs.clear_s())]
    update: list[Operation] = []
    wake: list[Operation] = []
    first_step = parts.zero
    match plan.training:
        case Disposition.DESTROY:
            sleep += [*parts.release(training, 0), pause, *parts.canary(export)]
            if plan.export is Export.COPIES:
                update += [parts.buffers(1), *sync, parts.buffers(-1)]
            elif export:
                update += sync
            else:
                back = gathering if lazy else live
                update += [*parts.restore(eager, gathering), *sync, *parts.release(back, 1)]
            wake += [resume, *parts.restore(eager, [])]
            first_step = parts.total(training, "create_s") if lazy else parts.zero
        case Disposition.DESTROY_AFTER_SYNC:
            late = [c for c in gathering if c not in training] if lazy else []
            sleep += [pause, *parts.canary(training)]
            update += [
                *([parts.creation(late)] if late else []),
                *sync,
                *parts.release([*training, *late], 1),
            ]
            wake += [resume, *parts.restore(eager, [])]
            first_step = parts.total(training, "create_s") if lazy else parts.zero
        case Disposition.KEEP:
            sleep += [pause, *parts.canary([*training, *export])]
            update += sync
            wake += [resume]
        case Disposition.SUSPEND:
            sleep += [parts.suspension(live), pause]
            # All of them: a trainer's export may use any group, and a suspended one would refuse.
            update += [parts.resumption(live), *parts.canary(live), *sync, parts.suspension(live)]
            wake += [resume, parts.resumption(live)]
    return Schedule(
        ranks=costs.cls.count,
        start_communicator_bytes=parts.total([*training, *export], "bytes"),
        saved_bytes=float(costs.saved_bytes),
        overhead_bytes=costs.overhead_bytes(),
        communicators=len(training) + len(export),
        first_step_s=first_step,
        phases={Phase.SLEEP: sleep, Phase.UPDATE_WEIGHTS: update, Phase.WAKE_UP: wake},
    )


class _Parts:
    """What happens to communicators in a switch, as operations."""

    def __init__(self, costs: ClassCosts, plan: Plan) -> None:
        self.costs, self.plan = costs, plan
        self.trainer = costs.scenario.trainer
        self.zero = np.zeros(costs.draws.count)

    def total(self, communicators: list[Communicator], what: str) -> Array:
        return sum((getattr(c, what) for c in communicators), self.zero)

    def release(self, which: list[Communicator], salt: int) -> list[Operation]:
        costs, plan = self.costs, self.plan
        if not any(site.is_managed for site in (*costs.cls.sites, costs.cls.world)):
            return []  # every group has one rank: there is nothing to destroy, so no port to wait for
        background = plan.background_release and salt == 0
        waits = costs.draws.waits(salt * WAITS // 2, len(which) + 1, PROXY_POLL_S)
        operations = [
            Operation(
                Component.GROUP_RELEASE,
                costs.release_s(which, waits, side_by_side=background),
                background=background,
                driver=not background,  # side by side, they all wait for a poll, and the driver is free
                owes_cooldown=True,
                communicator_bytes=-self.total(which, "bytes"),
            )
        ]
        if plan.cooldown is Cooldown.FIXED:
            seconds = np.full(costs.draws.count, self.trainer.cooldown_s)
            operations.append(Operation(Component.COOLDOWN, seconds))
        return operations

    def restore(self, eagerly: list[Communicator], on_use: list[Communicator]) -> list[Operation]:
        groups = len(self.costs.cls.sites) + int(self.trainer.manage_world)
        operations = [
            Operation(Component.COOLDOWN, self.zero, awaits_cooldown=True),
            Operation(Component.GROUP_RESTORE, self.costs.handles_s(groups), store=True, joins=True),
        ]
        created = eagerly or on_use
        return [*operations, self.creation(created)] if created else operations

    def creation(self, which: list[Communicator]) -> Operation:
        return Operation(
            Component.FIRST_COLLECTIVE,
            self.total(which, "create_s"),
            driver=True,
            joins=True,
            communicator_bytes=self.total(which, "bytes"),
        )

    def suspension(self, which: list[Communicator]) -> Operation:
        return Operation(
            Component.GROUP_RELEASE,
            self.total(which, "suspend_s"),
            driver=True,
            communicator_bytes=-self._suspended_bytes(which),
        )

    def resumption(self, which: list[Communicator]) -> Operation:
        return Operation(
            Component.GROUP_RESTORE,
            self.total(which, "resume_s"),
            driver=True,
            joins=True,
            communicator_bytes=self._suspended_bytes(which),
        )

    def _suspended_bytes(self, which: list[Communicator]) -> Array:
        left = np.minimum(self.costs.draws["suspend.left_share"], 1.0)
        return np.asarray(self.total(which, "bytes") * (1 - left))

    def buffers(self, sign: int) -> Operation:
        """Making (1) or freeing (-1) the two buffers through which weights are copied between ranks."""
        count = self.costs.draws.count
        return Operation(
            Component.GROUP_RESTORE if sign > 0 else Component.GROUP_RELEASE,
            self.costs.draws["copies.buffers_s"],
            joins=True,
            communicator_bytes=np.full(count, sign * 2.0 * COPIES_PART_BYTES),
        )

    def canary(self, which: list[Communicator]) -> list[Operation]:
        if not self.plan.canary or not which:
            return []
        seconds = self.costs.draws["canary.once_s"] + self.total(which, "canary_s")
        return [Operation(Component.CANARY, seconds, joins=True)]

    def gather_s(self, dedicated: bool) -> Array:
        if self.plan.export is Export.COPIES:
            return self.costs.copies_s()
        return self.costs.gather_s(self.plan.export_max_ctas if dedicated else self.plan.hot_max_ctas)
