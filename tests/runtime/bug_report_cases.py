"""What ``test_bug_reports`` does on ranks: a trainer with named groups, and faults of the kinds that users reported.

Each ``case_`` function runs on every rank, in processes of its own, so that it may replace what it likes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from group_world import Way, World
from rank_server import FACTS, logged

from pitstop.gates import TORCH_MEMORY_SAVER
from pitstop.plan import NAMED_PLANS
from pitstop.units import GIB
from pitstop_runtime import executor, facts, preflight
from pitstop_runtime.executor import Limits
from pitstop_runtime.groups import Communicator, registry
from pitstop_runtime.manager import Settings, SwitchManager
from pitstop_runtime.saver import NullSaver
from pitstop_runtime.sync import WeightSync

# ``pitstop_runtime.groups`` has a function of the same name.
communicators = importlib.import_module("pitstop_runtime.groups.communicator")

LIMITS = Limits(timeout_s=10.0, canary_s=5.0, cooldown_s=0.01)
SAVED = 8 * GIB


class PretendSaver(NullSaver):
    """Pauses nothing, but passes for the saver that the gates ask for, with 8 GiB."""

    name = TORCH_MEMORY_SAVER

    def saved_bytes(self) -> int:
        return SAVED


def manager_of(plan: str = "reload", stated: dict[str, Any] | None = None, **options: Any) -> SwitchManager:
    limits = options.pop("limits", LIMITS)
    settings = Settings(limits=limits, clear_memory=False, **options.pop("settings", {}))
    options.setdefault("saver", PretendSaver())
    return SwitchManager(plan, facts=replace(FACTS, **(stated or {})), settings=settings, **options)


def total(group: Any = None) -> float:
    """A sum over a group: ranks plus one."""
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor, group=group)
    return float(tensor)


def switch(manager: SwitchManager, group: Any) -> float:
    """A whole switch with an export over the group; the sum over it afterwards."""
    with manager.sleeping():
        manager.update_weights(lambda _: total(group))
    return total(group)


def outcome(action: Callable[[], Any]) -> list[str]:
    """The kind of error that an action raises, and its text."""
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["done", ""]


def made(manager: Callable[[], SwitchManager]) -> list[Any]:
    """How making a manager ends: its plan's stage and why it was given up, or the error."""
    try:
        enabling = manager().enabling
    except Exception as error:
        return [type(error).__name__, str(error)]
    return [enabling.stage.value, enabling.reason or ""]


# Groups.


def case_alone() -> dict[str, Any]:
    """Every named plan in a world of one rank."""
    group = dist.new_group([0], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    found = {}
    for plan in NAMED_PLANS:
        manager = manager_of(plan)
        found[plan] = [switch(manager, group) for _ in range(3)]
        manager.shutdown()
    return {"sums": found, "managed": len(registry.managed()), "communicators": len(registry.communicators())}


class Invalid:
    """A group whose native part is gone: collectives of before still pass, whatever ends it raises."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def shutdown(self) -> None:
        raise RuntimeError("Invalid process group specified")

    def _get_backend(self, *_: object) -> Any:
        raise RuntimeError("Could not find the backend")


def case_invalid_group() -> dict[str, Any]:
    """On rank 1 one group has become invalid before ``sleep``."""
    world = World(Way.FRESH)
    manager = manager_of()
    if world.rank == 1:
        communicator = world.whole.communicator
        communicator._inner = Invalid(communicator._inner)
        communicator._enter(communicator.state)
    with logged() as said:
        sums = [switch(manager, world.whole), total(world.twin), total()]
    return {"sums": sums, "said": said, "state": manager.state.value}


def case_wrapped() -> list[Any]:
    """On rank 1 another library has replaced ``new_group`` when the manager is made."""
    World(Way.FRESH)
    if dist.get_rank() == 1:
        plain = dist.new_group

        def new_group(*args: Any, **options: Any) -> Any:
            return plain(*args, **options)

        new_group.__module__ = "slime.utils.reloadable_process_group"
        dist.new_group = new_group
    return made(manager_of)


def case_two_nodes(plan: str, canary_passed: bool | None) -> list[Any]:
    """Each rank calls itself a node."""
    facts.socket = SimpleNamespace(gethostname=lambda: f"node{dist.get_rank()}")  # type: ignore[attr-defined]
    World(Way.FRESH)
    return made(lambda: manager_of(plan, {"cross_node_canary_passed": canary_passed}))


def case_deepep(plan: str, freed: bool) -> list[Any]:
    """DeepEP is loaded on rank 1."""
    World(Way.FRESH)
    if dist.get_rank() == 1:
        sys.modules["deep_ep"] = ModuleType("deep_ep")
    return made(lambda: manager_of(plan, {"deepep_loaded": False} if freed else {}))


# Ports.


class Clock:
    """Time that passes by waiting only."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def case_ports(plan: str, cooldown_s: float, port_s: float) -> dict[str, Any]:
    """Ports are in use for a while after a destroy, and a rebuild that finds its port in use fails."""
    world, clock = World(Way.FRESH), Clock()
    executor.time = clock  # type: ignore[assignment]
    free_at: dict[str, float] = {}
    release, build = Communicator.release, communicators.build_group

    def releasing(self: Communicator) -> None:
        if self._inner is not None:
            free_at[self.name] = clock.now + port_s
        release(self)

    def building(*args: Any) -> Any:
        if clock.now < free_at.get(args[6], 0.0):
            raise RuntimeError("Address already in use")
        return build(*args)

    manager = manager_of(plan, limits=replace(LIMITS, cooldown_s=cooldown_s))
    Communicator.release, communicators.build_group = releasing, building  # type: ignore[method-assign]
    return {
        "ended": outcome(lambda: [switch(manager, world.whole) for _ in range(3)]),
        "destroyed": len(free_at),
        "state": manager.state.value,
    }


# Other entry points.


def case_save_asleep() -> dict[str, Any]:
    """A checkpoint between ``sleep`` and ``update_weights``, announced as it should be."""
    world = World(Way.FRESH)
    manager = manager_of("keep")
    switch(manager, world.whole)
    manager.sleep()
    kept = world.whole.communicator.inner
    saved: list[str] = []

    def save() -> None:
        with manager.saving():
            saved.append("saved")
            dist.destroy_process_group(world.whole)

    found: dict[str, Any] = {"refused": outcome(save), "state": manager.state.value, "saved": list(saved)}
    manager.update_weights(lambda _: total(world.whole))
    found["kept"] = world.whole.communicator.inner is kept
    manager.wake_up()
    with manager.saving():
        saved.append("saved")
    return found | {
        "total": total(world.whole),
        "saved then": saved,
        "stage": manager.enabling.stage.value,
    }


def case_destroyed_behind() -> dict[str, Any]:
    """As above, but nobody was told, and a group that the export needs is gone."""
    world = World(Way.FRESH)
    manager = manager_of("keep")
    switch(manager, world.whole)
    manager.sleep()
    dist.destroy_process_group(world.whole)
    sync = outcome(lambda: manager.update_weights(lambda _: total(world.whole)))
    found: dict[str, Any] = {"sync": sync, "state": manager.state.value}
    manager.update_weights(lambda _: total(world.twin))  # the trainer finds another way
    manager.wake_up()
    return found | {
        "total": total(world.twin),
        "stage": manager.enabling.stage.value,
        "plan": manager.plan.name,
    }


# Weight sync.


class Unexportable:
    """A tensor whose memory CUDA IPC does not take; that of the saver is such."""

    def untyped_storage(self) -> Unexportable:
        return self

    def _share_cuda_(self) -> None:
        raise RuntimeError("CUDA error: invalid argument\nCompile with TORCH_USE_CUDA_DSA")


class Exportable(Unexportable):
    def _share_cuda_(self) -> None:
        pass


def case_ipc(outside_helps: bool) -> dict[str, Any]:
    """Rank 1 has a device on which memory of the saver cannot be exported; or no memory at all."""
    world = World(Way.FRESH)
    outside: list[bool] = []

    class Savers(PretendSaver):
        @contextmanager
        def disabled(self) -> Iterator[None]:
            outside.append(True)
            yield
            outside.pop()

    def zeros(*_: object, **__: object) -> Any:
        return Exportable() if outside and outside_helps else Unexportable()

    if world.rank == 1:
        cuda = SimpleNamespace(is_available=lambda: True)
        preflight.torch = SimpleNamespace(cuda=cuda, zeros=zeros)  # type: ignore[assignment]
    return {"made": made(lambda: manager_of(saver=Savers()))}


class Engine:
    """Loads what it is sent; a stale one says that all went well."""

    def __init__(self, stale: bool) -> None:
        self.stale = stale
        self.version = 0

    def load(self, version: int) -> str:
        if not self.stale:
            self.version = version
        return "ok"


def case_stale_engine() -> dict[str, Any]:
    """The engine beside rank 1 keeps its weights without a word, until it is started anew."""
    world = World(Way.FRESH)
    manager = manager_of("keep")
    engine = Engine(stale=world.rank == 1)

    def export(sync: WeightSync) -> None:
        total(world.whole)
        engine.load(7)
        sync.confirm(sent=7, loaded=engine.version)

    manager.sleep()
    found: dict[str, Any] = {"sync": outcome(lambda: manager.update_weights(export))}
    found["state"] = manager.state.value
    engine.stale = False
    manager.update_weights(export)
    manager.wake_up()
    return found | {"total": total(world.whole), "version": engine.version, "plan": manager.plan.name}


def case_unconfirmed() -> dict[str, Any]:
    """An export that returns at once, having sent nothing."""
    world = World(Way.FRESH)
    manager = manager_of("keep", settings={"require_confirmation": True})
    with manager.sleeping():
        sync = outcome(lambda: manager.update_weights(lambda _: None))
        manager.update_weights(lambda sync: sync.confirm(sent=1, loaded=1))
    return {"sync": sync, "total": total(world.whole), "plan": manager.plan.name}
