"""More of what ``test_bug_reports`` does on ranks: memory that is missing, taken too early, damaged or leaked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bug_report_cases import PretendSaver, communicators, manager_of, outcome, switch, total
from group_world import Way, World
from rank_server import logged

from pitstop.components import Component, Phase
from pitstop.plan import NAMED_PLANS
from pitstop.telemetry import StepRecord
from pitstop.units import GIB
from pitstop_runtime.groups import BACKEND_NAME
from pitstop_runtime.handover import HandOver
from pitstop_runtime.saver import AllocatorReport, ParameterCheck, check_headroom

LATE_S = 0.5


def case_engine_memory() -> dict[str, Any]:
    """The trainer of rank 1 still holds what was promised to the engine when ``sleep`` ends."""
    world = World(Way.FRESH)
    manager = manager_of(settings={"engine_bytes": 60 * GIB})
    free = [(10 if world.rank == 1 else 90) * GIB]
    manager._hand_over = HandOver(manager._control, manager._saver, on_device(free))
    found: dict[str, Any] = {"sleep": outcome(manager.sleep), "then": manager.state.value}
    manager.wake_up()
    free[0] = 90 * GIB
    return found | {"total": switch(manager, world.whole), "state": manager.state.value}


def case_no_room_to_wake() -> dict[str, Any]:
    """The engine of rank 1 has not let go when ``wake_up`` is called for the first time."""
    world = World(Way.FRESH)
    manager = manager_of("lean-released")
    free = [90 * GIB]
    manager._hand_over = HandOver(manager._control, manager._saver, on_device(free))
    switch(manager, world.whole)
    manager.sleep()
    manager.update_weights(lambda _: total(world.whole))
    free[0] = (3 if world.rank == 1 else 90) * GIB
    live = manager._executor.live_count()
    found: dict[str, Any] = {"refused": outcome(manager.wake_up), "state": manager.state.value}
    found["untouched"] = manager._saver.paused and manager._executor.live_count() == live
    free[0] = 90 * GIB
    manager.wake_up()
    return found | {"total": total(world.whole), "plan": manager.plan.name, "then": manager.state.value}


def on_device(free: list[int]) -> Callable[..., object]:
    """The check of a device with so much free now."""

    def check(needed: int, *, paused_bytes: int | None = 0) -> object:
        report = AllocatorReport("0", free[0], 139 * GIB, 40 * GIB, 30 * GIB)
        return check_headroom(needed, paused_bytes=paused_bytes, report=lambda _: report)

    return check


def case_late_pause() -> dict[str, float]:
    """Rank 1 takes long to pause."""
    World(Way.FRESH)
    times: dict[str, float] = {}

    class Slow(PretendSaver):
        def pause(self) -> None:
            if dist.get_rank() == 1:
                time.sleep(LATE_S)
            super().pause()
            times["paused"] = time.monotonic()

    manager = manager_of("keep", saver=Slow())
    manager.sleep()
    times["left"] = time.monotonic()
    manager.wake_up()
    return times


def case_full_memory() -> dict[str, Any]:
    """Communicators take their memory in their first collective, and while training there is none left.

    That is NCCL's way; gloo's groups are taught it here.
    """
    world = World(Way.FRESH)
    build = communicators.build_group
    device = {"full": False}

    class Lazy:
        def __init__(self, inner: Any) -> None:
            self._inner, self._connected = inner, False

        def __getattr__(self, name: str) -> Any:
            if name in ("allreduce", "allgather") and not self._connected:
                if device["full"]:
                    raise RuntimeError("NCCL error: out of memory")
                self._connected = True
            return getattr(self._inner, name)

    communicators.build_group = lambda *args: Lazy(build(*args))
    seen: list[str] = []

    def observe(phase: Phase, component: Component) -> None:
        seen.append(f"{phase}/{component}")

    manager = manager_of(observer=observe)
    found: dict[str, Any] = {}
    for plan in ("reload", "reload-deferred", "lean-released"):
        manager.change_plan(NAMED_PLANS[plan])
        switched = []
        for _ in range(2):
            device["full"] = False
            with manager.sleeping():
                manager.update_weights(lambda _: total(world.whole))
            device["full"] = True
            switched.append(outcome(lambda: [total(world.whole), total(world.twin), total()]))
        found[plan] = switched
    return found | {"seen": "wake_up/first_collective" in seen}


def case_damaged() -> dict[str, Any]:
    """A weight of rank 1 changes while memory is paused."""
    World(Way.FRESH)
    weight = torch.ones(100)
    manager = manager_of(check=ParameterCheck(lambda: [("layer.weight", weight)]))
    manager.sleep()
    if dist.get_rank() == 1:
        weight[7] = 2.0
    found: dict[str, Any] = {"woken": outcome(manager.wake_up), "state": manager.state.value}
    return found | {"training": outcome(manager.training().__enter__)}


# Leaks.


def case_many_switches(leak: bool) -> dict[str, Any]:
    """Twenty switches; a trainer that leaks makes a group in each, and never destroys it."""
    world = World(Way.FRESH)
    records: list[StepRecord] = []
    manager = manager_of(on_record=records.append)
    with logged() as said:
        for _ in range(20 if not leak else 8):
            if leak:
                dist.new_group(list(range(world.size)), backend=BACKEND_NAME)
            switch(manager, world.whole)
        manager.shutdown()
    return {"counts": [record.counts.model_dump() for record in records if record.counts], "said": said}
