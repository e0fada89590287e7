"""What a class of ranks does in a switch under a plan, as an ordered list of operations per phase."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pitstop.components import Component, Phase
from pitstop.plan import Cooldown, Disposition, Plan
from pitstop.scenario import GroupCreation

from .calibration import WAITS, Array
from .costs import PROXY_POLL_S, ClassCosts, Communicator, SiteFactors


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
    zero = np.zeros(costs.draws.count)
    trainer = costs.scenario.trainer
    lazy = trainer.group_creation is GroupCreation.LAZY
    live = costs.live(plan)
    export = costs.export_only(plan)
    gathering = export or [c for c in live if c.in_export]
    destroys = plan.training in (Disposition.DESTROY, Disposition.DESTROY_AFTER_SYNC)
    # Destroyed lazy communicators come back only with their next use, so training has those that a step uses.
    training = [c for c in live if c.in_step] if lazy and destroys else live
    groups = len(costs.cls.sites) + int(trainer.manage_world)

    def total(communicators: list[Communicator], what: str) -> Array:
        return sum((getattr(c, what) for c in communicators), zero)

    def release(which: list[Communicator], salt: int) -> list[Operation]:
        if not any(site.is_managed for site in (*costs.cls.sites, costs.cls.world)):
            return []  # every group has one rank: there is nothing to destroy, so no port to wait for
        seconds = costs.release_s(which, costs.draws.waits(salt * WAITS // 2, len(which) + 1, PROXY_POLL_S))
        background = plan.background_release and salt == 0
        operations = [
            Operation(
                Component.GROUP_RELEASE,
                seconds,
                background=background,
                driver=True,
                owes_cooldown=True,
                communicator_bytes=-total(which, "bytes"),
            )
        ]
        if plan.cooldown is Cooldown.FIXED:
            operations.append(Operation(Component.COOLDOWN, np.full(costs.draws.count, trainer.cooldown_s)))
        return operations

    def restore(eagerly: list[Communicator], on_use: list[Communicator]) -> list[Operation]:
        operations = [
            Operation(Component.COOLDOWN, zero, awaits_cooldown=True),
            Operation(Component.GROUP_RESTORE, costs.handles_s(groups), store=True, joins=True),
        ]
        created = eagerly or on_use
        if created:
            operations.append(_creation(created, total))
        return operations

    def suspension(which: list[Communicator]) -> Operation:
        left = 1 - np.minimum(costs.draws["suspend.left_share"], 1.0)
        return Operation(
            Component.GROUP_RELEASE,
            total(which, "suspend_s"),
            driver=True,
            communicator_bytes=-total(which, "bytes") * left,
        )

    def resumption(which: list[Communicator]) -> Operation:
        left = 1 - np.minimum(costs.draws["suspend.left_share"], 1.0)
        return Operation(
            Component.GROUP_RESTORE,
            total(which, "resume_s"),
            driver=True,
            joins=True,
            communicator_bytes=total(which, "bytes") * left,
        )

    def canary(which: list[Communicator]) -> list[Operation]:
        wanted = plan.canary and bool(which)
        seconds = costs.draws["canary.once_s"] + total(which, "canary_s")
        return [Operation(Component.CANARY, seconds, joins=True)] if wanted else []

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
        Operation(
            Component.WEIGHTS_GATHER, costs.gather_s(plan.export_max_ctas if export else None), joins=True
        ),
        Operation(Component.WEIGHTS_TRANSFER, costs.transfer_s()),
        Operation(Component.ENGINE_LOAD, costs.load_s(factors)),
    ]
    sleep = [Operation(Component.CLEAR_MEMORY, costs.clear_s())]
    update: list[Operation] = []
    wake: list[Operation] = []
    first_step = zero
    match plan.training:
        case Disposition.DESTROY:
            sleep += [*release(training, 0), pause, *canary(export)]
            if export:
                update += sync
            else:
                back = gathering if lazy else live
                update += [*restore([] if lazy else live, gathering), *sync, *release(back, 1)]
            wake += [resume, *restore([] if lazy else live, [])]
            first_step = total(training, "create_s") if lazy else zero
        case Disposition.DESTROY_AFTER_SYNC:
            late = [c for c in gathering if c not in training] if lazy else []
            sleep += [pause, *canary(training)]
            update += [*([_creation(late, total)] if late else []), *sync, *release([*training, *late], 1)]
            wake += [resume, *restore([] if lazy else live, [])]
            first_step = total(training, "create_s") if lazy else zero
        case Disposition.KEEP:
            sleep += [pause, *canary([*training, *export])]
            update += sync
            wake += [resume]
        case Disposition.SUSPEND:
            sleep += [suspension(live), pause]
            update += [resumption(gathering), *canary(gathering), *sync, suspension(gathering)]
            wake += [resume, resumption(live)]
    return Schedule(
        ranks=costs.cls.count,
        start_communicator_bytes=total([*training, *export], "bytes"),
        saved_bytes=float(costs.saved_bytes),
        overhead_bytes=costs.overhead_bytes(),
        communicators=len(training) + len(export),
        first_step_s=first_step,
        phases={Phase.SLEEP: sleep, Phase.UPDATE_WEIGHTS: update, Phase.WAKE_UP: wake},
    )


def _creation(which: list[Communicator], total: object) -> Operation:
    assert callable(total)
    return Operation(
        Component.FIRST_COLLECTIVE,
        total(which, "create_s"),
        driver=True,
        joins=True,
        communicator_bytes=total(which, "bytes"),
    )
