"""The SimPy engine: one switch, event by event, with one process per class of ranks.

Phases end when the slowest class has ended; collectives wait for all; the rendezvous store serves one class at a time;
a process's driver does one thing at a time; an owed cooldown is waited for only as long as it still runs.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import simpy

from pitstop.components import Component, Phase

from .schedule import Operation, Schedule

Process = Generator[simpy.Event, object, None]


@dataclass(slots=True)
class Moment:
    """Device bytes per GPU of one class from ``at_s`` on."""

    at_s: float
    event: str
    trainer_bytes: float
    communicator_bytes: float
    overhead_bytes: float

    @property
    def total_bytes(self) -> float:
        """All that the trainer holds."""
        return self.trainer_bytes + self.communicator_bytes + self.overhead_bytes


@dataclass(slots=True)
class SwitchResult:
    """One simulated switch. Component seconds are those of the busiest class, waiting included, and add up."""

    phase_s: dict[Phase, float] = field(default_factory=dict)
    component_s: dict[Component, float] = field(default_factory=dict)
    held_at_sync_bytes: float = 0.0
    held_in_rollout_bytes: float = 0.0
    peak_bytes: float = 0.0
    timeline: list[Moment] = field(default_factory=list)

    @property
    def switch_s(self) -> float:
        """Seconds of the three phases."""
        return sum(self.phase_s.values())


class _Barrier:
    """Releases all parties once the last has arrived; reusable."""

    def __init__(self, env: simpy.Environment, parties: int) -> None:
        self.env, self.parties, self.waiting, self.event = env, parties, 0, env.event()

    def wait(self) -> simpy.Event:
        self.waiting += 1
        event = self.event
        if self.waiting == self.parties:
            self.waiting, self.event = 0, self.env.event()
            event.succeed()
        return event


class _ClassRun:
    """State of one class during the switch."""

    def __init__(self, env: simpy.Environment, schedule: Schedule, draw: int, ranks_per_gpu: int) -> None:
        self.env, self.schedule, self.draw, self.ranks_per_gpu = env, schedule, draw, ranks_per_gpu
        self.driver = simpy.Resource(env)
        self.has_background = any(op.background for ops in schedule.phases.values() for op in ops)
        self.cooldown_until = 0.0
        self.trainer = schedule.saved_bytes
        self.communicators = float(schedule.start_communicator_bytes[draw])
        self.overhead = float(schedule.overhead_bytes[draw])
        self.busy: dict[Component, float] = {}
        self.work_s = 0.0
        self.timeline: list[Moment] = []
        self.mark("training")

    def mark(self, event: str) -> None:
        n = self.ranks_per_gpu
        moment = Moment(self.env.now, event, n * self.trainer, n * self.communicators, n * self.overhead)
        self.timeline.append(moment)

    def apply(self, operation: Operation) -> None:
        self.trainer += operation.trainer_bytes
        if operation.communicator_bytes is not None:
            self.communicators += float(operation.communicator_bytes[self.draw])
        if operation.trainer_bytes or operation.communicator_bytes is not None:
            self.mark(operation.component.value)


def simulate(
    schedules: list[Schedule], draw: int, *, ranks_per_gpu: int, cooldown_s: float, rollout_s: float
) -> SwitchResult:
    """Simulate one switch.

    Args:
        schedules: one per class, of the same plan.
        draw: index into the schedules' arrays.
        ranks_per_gpu: ranks of a class that share a GPU; bytes are reported per GPU.
        cooldown_s: length of an owed cooldown.
        rollout_s: time between the end of update_weights and the start of wake_up.
    """
    env = simpy.Environment()
    barrier = _Barrier(env, len(schedules))
    store = simpy.Resource(env)
    runs = [_ClassRun(env, schedule, draw, ranks_per_gpu) for schedule in schedules]
    result = SwitchResult()

    def perform(run: _ClassRun, operation: Operation) -> Process:
        if operation.awaits_cooldown and run.cooldown_until > env.now:
            yield env.timeout(run.cooldown_until - env.now)
        seconds = float(operation.seconds[draw])
        if seconds > 0:
            # Asking for a resource that nobody else can want costs events and changes nothing.
            contended = operation.driver and run.has_background
            resource = store if operation.store and len(runs) > 1 else run.driver if contended else None
            if resource is None:
                yield env.timeout(seconds)
            else:
                with resource.request() as turn:
                    yield turn
                    yield env.timeout(seconds)
            run.work_s += seconds
        if operation.owes_cooldown:
            run.cooldown_until = env.now + cooldown_s
        run.apply(operation)

    def switch(run: _ClassRun) -> Process:
        for name in Phase:
            started = env.now
            beside: list[simpy.Process] = []
            for operation in run.schedule.phases[name]:
                if operation.is_idle(draw):
                    continue
                start = env.now
                if operation.background:
                    beside.append(env.process(perform(run, operation)))
                    continue
                yield from perform(run, operation)
                if operation.joins and len(runs) > 1:
                    yield barrier.wait()
                run.busy[operation.component] = run.busy.get(operation.component, 0.0) + env.now - start
            if beside:
                start = env.now
                yield simpy.AllOf(env, beside)
                release = Component.GROUP_RELEASE
                run.busy[release] = run.busy.get(release, 0.0) + env.now - start
            if len(runs) > 1:
                yield barrier.wait()
            # All classes leave the barrier at the same time, so each of them would note the same seconds.
            result.phase_s[name] = env.now - started
            held = run.timeline[-1].total_bytes
            if name is Phase.SLEEP:
                result.held_at_sync_bytes = max(result.held_at_sync_bytes, held)
            elif name is Phase.UPDATE_WEIGHTS:
                result.held_in_rollout_bytes = max(result.held_in_rollout_bytes, held)
                yield env.timeout(rollout_s)

    done = simpy.AllOf(env, [env.process(switch(run)) for run in runs])
    env.run(until=done)  # raises if a class waits at a barrier that the others never reach
    busiest = max(runs, key=lambda run: run.work_s)
    result.component_s = _accounted(busiest, result)
    result.timeline = max(runs, key=lambda run: max(m.total_bytes for m in run.timeline)).timeline
    result.peak_bytes = max(moment.total_bytes for moment in result.timeline)
    return result


def _accounted(run: _ClassRun, result: SwitchResult) -> dict[Component, float]:
    """Components that add up to the switch: the rest of a phase, waiting for other classes, goes to the largest."""
    components = dict(run.busy)
    rest = result.switch_s - sum(components.values())
    if components and rest > 0:
        largest = max(components, key=lambda c: components[c])
        components[largest] += rest
    return components
