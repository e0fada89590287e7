"""How members of a communicator meet again: never in an old meeting, and never without one that is late."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_world import Way, World
from rank_server import FACTS, on_ranks

from pitstop.gates import TORCH_MEMORY_SAVER
from pitstop_runtime.errors import SwitchError
from pitstop_runtime.executor import Limits
from pitstop_runtime.groups import CommunicatorState, registry, release
from pitstop_runtime.groups.communicator import Rendezvous
from pitstop_runtime.manager import Settings, SwitchManager
from pitstop_runtime.saver import NullSaver, Recomputed

pytestmark = pytest.mark.megatron

LATE_S = 1.0


def total(group: Any = None) -> float:
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor, group=group)
    return float(tensor)


def test_every_meeting_has_a_prefix_of_its_own() -> None:
    rendezvous = Rendezvous()
    seen = []
    for epoch in (
        None,
        1,
        2,
        7,
        1,
        2,
        3,
    ):  # the second 1 comes from another SwitchManager of the same process
        if epoch is not None:
            rendezvous.begin_epoch(epoch)
        seen += [rendezvous.prefix(name) for name in ("1", "2", "1", "1/1")]
    assert len(set(seen)) == len(seen)


def test_ranks_that_built_more_often_meet_the_others_in_the_next_epoch() -> None:
    eager, steady = Rendezvous(), Rendezvous()
    assert eager.prefix("1") == steady.prefix("1")
    for _ in range(3):
        eager.prefix("1")
    assert eager.prefix("1") != steady.prefix("1")
    for rendezvous in (eager, steady):
        rendezvous.begin_epoch(4)
    assert eager.prefix("1") == steady.prefix("1")


def case_late_to_a_rebuild() -> dict[str, float]:
    world = World(Way.FRESH)
    assert world.part is None or total(world.part) == 5.0
    release(registry.communicators())
    world.agree()
    if world.rank == 2:
        time.sleep(LATE_S)
    came = time.monotonic()
    world.whole.communicator.build()
    left = time.monotonic()
    return {"came": came, "left": left, "total": total(world.whole)}


def test_a_rebuild_waits_for_a_member_that_is_late() -> None:
    found = on_ranks(case_late_to_a_rebuild, 3)
    assert max(each["came"] for each in found) - min(each["came"] for each in found) > LATE_S / 2
    assert all(each["left"] >= found[2]["came"] for each in found)
    assert {each["total"] for each in found} == {6.0}


def case_failed_alone() -> Any:
    """One rank builds where the others do not come; then all agree, and all build."""
    world = World(Way.FRESH)
    communicator = world.whole.communicator
    release([communicator])
    failed = ""
    registry.rendezvous.limit_s = 0.3
    if world.rank == 1:
        try:
            communicator.build()
        except SwitchError as error:
            failed = str(error)
    registry.rendezvous.limit_s = None
    assert communicator.state is CommunicatorState.RELEASED
    world.agree()
    registry.rendezvous.begin_epoch(1)
    communicator.build()
    return [failed != "", total(world.whole)]


def test_a_rank_that_built_in_vain_meets_the_others_after_they_agreed() -> None:
    assert on_ranks(case_failed_alone, 2) == [[False, 3.0], [True, 3.0]]


class _PretendSaver(NullSaver):
    """Pauses nothing, but passes for the saver that the gates ask for."""

    name = TORCH_MEMORY_SAVER


def switch_manager(recomputed: Recomputed | None = None) -> SwitchManager:
    limits = Limits(timeout_s=10.0, canary_s=5.0, cooldown_s=0.01)
    return SwitchManager(
        "reload",
        saver=_PretendSaver(),
        facts=FACTS,
        settings=Settings(limits=limits, clear_memory=False),
        recomputed=recomputed,
    )


def case_late_after_its_rebuild() -> dict[str, float]:
    """Wake up, one rank late after it has built its communicators: with NCCL, that waits for nobody."""
    world = World(Way.FRESH)
    times = {}

    class Late(Recomputed):
        def restore(self) -> None:
            super().restore()
            assert all(each.state is CommunicatorState.LIVE for each in registry.communicators())
            if world.rank == 1:
                time.sleep(LATE_S)
            times["restored"] = time.monotonic()

    manager = switch_manager(Late())
    with manager.sleeping(0):
        manager.update_weights(lambda _: total(world.whole))
    times["left"] = time.monotonic()
    times["total"] = total(world.whole)
    manager.shutdown()
    return times


def test_no_rank_leaves_wake_up_before_all_have_restored() -> None:
    found = on_ranks(case_late_after_its_rebuild, 3)
    assert min(each["left"] for each in found) >= max(each["restored"] for each in found)
    assert found[1]["restored"] - found[0]["restored"] > LATE_S / 2
    assert {each["total"] for each in found} == {6.0}


def case_two_managers() -> list[Any]:
    """Switches under one manager and then under another: each meeting is a new one."""
    world = World(Way.FRESH)
    prefixes: list[str] = []
    prefix = registry.rendezvous.prefix

    def noted(name: str) -> str:
        prefixes.append(prefix(name))
        return prefixes[-1]

    registry.rendezvous.prefix = noted  # type: ignore[method-assign]
    totals = []
    for _ in range(2):
        manager = switch_manager()
        for step in range(2):
            with manager.sleeping(step):
                manager.update_weights(lambda _: total(world.whole))
            totals.append(total(world.whole))
        manager.shutdown()
    return [totals, len(prefixes), len(set(prefixes)), sorted(prefixes)]


def test_a_second_manager_never_meets_where_the_first_one_did() -> None:
    found = on_ranks(case_two_managers, 2)
    for totals, meetings, different, _ in found:
        assert totals == [3.0] * 4
        assert meetings == different > 8
