"""The ends of managed groups: ``destroy_process_group`` behaves as over plain gloo, whatever was done before."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_world import TIMEOUT, Way, World, begin_world
from rank_server import on_ranks
from torch.distributed import ProcessGroup

from pitstop_runtime.groups import BACKEND_NAME, CommunicatorState, Wiring, registry, release

pytestmark = pytest.mark.megatron


def total(group: ProcessGroup | None = None) -> float:
    """A sum over a group: ranks plus one."""
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor, group=group)
    return float(tensor)


def outcome(action: Any, *arguments: Any, **options: Any) -> str:
    """The kind of error that an action raises."""
    try:
        action(*arguments, **options)
    except Exception as error:
        return type(error).__name__
    return "done"


def case_destroying(backend: str, store: str, before: str) -> dict[str, Any]:
    """Destroy one group, then all, each twice; ``before`` says what is done to the communicators first."""
    begin_world(backend, f"{store}.1")
    world = World(Way.PLAIN if backend == "gloo" else Way.SHARED if before == "share" else Way.FRESH)
    if before == "release":
        release(registry.communicators())
    elif before == "abort":
        for each in registry.communicators():
            each.abort()
    found: dict[str, Any] = {"destroyed": outcome(dist.destroy_process_group, world.whole)}
    found["again"] = outcome(dist.destroy_process_group, world.whole)
    if before in ("", "share"):
        found["others"] = [total(world.twin), total()]
    if before == "share":
        world.rebuild()
        found["others"] = [total(world.twin), total()]
    found["all"] = outcome(dist.destroy_process_group)
    found["all, again"] = outcome(dist.destroy_process_group)
    found["initialized"] = dist.is_initialized()
    dist.init_process_group(
        backend, timeout=TIMEOUT, rank=world.rank, world_size=world.size, init_method=f"file://{store}.2"
    )
    found["after"] = [total(), total(dist.new_group(timeout=TIMEOUT))]
    dist.destroy_process_group()
    return found


def test_destroying_behaves_as_over_plain_gloo(tmp_path: Path) -> None:
    plain = on_ranks(case_destroying, 2, "gloo", str(tmp_path / "plain"), "")
    assert plain[0]["others"] == [3.0, 3.0]
    for before in ("", "share"):
        store = str(tmp_path / f"managed-{before}")
        assert on_ranks(case_destroying, 2, BACKEND_NAME, store, before) == plain, before


@pytest.mark.parametrize("before", ["release", "abort"])
def test_groups_without_a_live_communicator_are_destroyed_in_silence(tmp_path: Path, before: str) -> None:
    for found in on_ranks(case_destroying, 2, BACKEND_NAME, str(tmp_path / "store"), before):
        assert found["destroyed"] == found["all"] == "done"
        assert found["after"] == [3.0, 3.0]


def case_shared_ends() -> dict[str, Any]:
    """Destroy the groups of one communicator, one by one."""
    world = World(Way.SHARED)
    communicator = world.twin.communicator
    assert communicator is world.whole.communicator
    states = []
    for group in (world.whole, world.twin):
        dist.destroy_process_group(group)
        states.append([communicator.state.value, [each.description for each in communicator.handles]])
    remaining = sorted(each.description for each in registry.managed())
    registry.rewire(Wiring(share=True))
    return {"states": states, "remaining": remaining, "total": total(dist.group.WORLD)}


def test_a_shared_communicator_ends_with_its_last_group() -> None:
    for found in on_ranks(case_shared_ends, 2):
        assert found["states"][0] == ["live", ["MODEL_PARALLEL_GROUP"]]
        assert found["states"][1][0] == "released"
        assert "TENSOR_MODEL_PARALLEL_GROUP" not in found["remaining"]
        assert "MODEL_PARALLEL_GROUP" not in found["remaining"]
        assert found["total"] == 3.0


def case_new_group_after_release() -> list[Any]:
    release(registry.communicators())
    # Torch names it by the number of groups, which is equal on all ranks only as long as they have the same ones.
    locally = dist.new_group([0, 1], TIMEOUT, use_local_synchronization=True)
    world = World(Way.FRESH)
    release(registry.communicators())
    later = dist.new_group([0, 1], TIMEOUT, group_desc="LATER")
    locally.communicator.build()
    found = [total(later), total(locally)]
    for each in registry.communicators():
        each.build()
    found += [total(group) for group in (dist.group.WORLD, world.whole, later, locally)]
    world.rebuild()
    return [*found, total(later), total(world.whole)]


def test_groups_can_be_made_while_the_others_are_released() -> None:
    assert on_ranks(case_new_group_after_release, 2) == [[3.0] * 8] * 2


def case_lone_ranks(store: str) -> dict[str, Any]:
    """Groups of one rank, in a world of two and as the world."""
    alone = [dist.new_group([rank], TIMEOUT, group_desc="DATA_PARALLEL_GROUP") for rank in range(2)]
    mine = alone[dist.get_rank()]
    backend = mine._get_backend(torch.device("cpu"))
    dist.barrier()  # a release closes the door on a rank that is still joining
    registry.rewire(Wiring(share=True, cold_max_ctas=1))
    release(registry.communicators())
    objects: list[Any] = [None]
    dist.all_gather_object(objects, "here", group=mine)
    found = {
        "torch's own": type(mine) is ProcessGroup,
        "managed": [each.description for each in registry.managed()],
        "untouched": mine._get_backend(torch.device("cpu")) is backend,
        "sum": total(mine) - dist.get_rank(),
        "objects": objects,
        "destroyed": outcome(dist.destroy_process_group, mine),
    }
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(BACKEND_NAME, init_method=f"file://{store}.{rank}", rank=0, world_size=1)
    found["as the world"] = [type(dist.group.WORLD) is ProcessGroup, len(registry.communicators()), total()]
    return found


def test_groups_of_one_rank_are_torchs_own(tmp_path: Path) -> None:
    for found in on_ranks(case_lone_ranks, 2, str(tmp_path / "store")):
        assert found == {
            "torch's own": True,
            "managed": ["default_pg"],
            "untouched": True,
            "sum": 1.0,
            "objects": ["here"],
            "destroyed": "done",
            "as the world": [True, 0, 1.0],
        }


def case_many_rebuilds() -> list[list[int]]:
    """Open files (sockets among them) and threads, after every fifth release and rebuild."""
    world = World(Way.FRESH)
    counts = []
    for _ in range(3):
        for _ in range(5):
            world.rebuild()
        gc.collect()
        counts.append([len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("fd", "task")])
    return counts


def test_rebuilding_leaves_no_sockets_or_threads_behind() -> None:
    for counts in on_ranks(case_many_rebuilds, 2):
        # Five rebuilds of three communicators would leave 15; some sockets close a moment later.
        assert all(
            abs(found - first) < 10 for each in counts for found, first in zip(each, counts[0], strict=True)
        )


def case_release_again() -> list[Any]:
    world = World(Way.FRESH)
    communicator = world.whole.communicator
    found = []
    for action in (communicator.release, communicator.release, communicator.build, communicator.build):
        action()
        found.append(communicator.state.value)
    found.append(total(world.whole))
    communicator.abort()
    communicator.abort()
    for action in (communicator.release, communicator.release, communicator.abort, communicator.build):
        action()
        found.append(communicator.state.value)
    assert communicator.state is CommunicatorState.LIVE
    return [*found, total(world.whole)]


def test_releasing_building_and_aborting_twice_does_nothing_more() -> None:
    expected = ["released", "released", "live", "live", 3.0, "released", "released", "released", "live", 3.0]
    assert on_ranks(case_release_again, 2) == [expected] * 2


def case_cool_down() -> list[list[str]]:
    """Wire anew twice, the second time for nothing."""
    World(Way.FRESH)
    seen: list[list[str]] = []

    def cool_down() -> None:
        seen.append(sorted({each.state.value for each in registry.communicators()}))

    registry.rewire(Wiring(share=True), cool_down)
    registry.rewire(Wiring(share=True), cool_down)
    assert total(dist.group.WORLD) == 3.0
    return seen


def test_ports_have_time_to_become_free_between_destroying_and_making() -> None:
    for seen in on_ranks(case_cool_down, 2):
        assert len(seen) == 1
        assert "released" in seen[0]
