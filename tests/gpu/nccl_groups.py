"""Checks of managed groups over NCCL: collectives, options and memory, over rebuilds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from nccl_collectives import COLLECTIVES, device, training, values
from nccl_world import (
    MIB,
    TIMEOUT,
    NotHereError,
    World,
    check,
    exchange,
    expect,
    options_of,
    refusal,
    total,
    used_bytes,
    whole_sum,
)
from torch.distributed import ProcessGroup

from pitstop_runtime.errors import GroupReleasedError, UnsupportedDispositionError
from pitstop_runtime.groups import (
    BACKEND_NAME,
    CommunicatorState,
    Library,
    ManagedGroup,
    Wiring,
    nccl,
    registry,
    release,
)


def expect_refused(world: World, state: CommunicatorState) -> int:
    """That every collective fails at once; how many there were."""
    actions = {name: action for name, action in COLLECTIVES.items() if name != "distributed tensors"}
    for name, action in actions.items():
        error, text, at_once = refusal(lambda action=action: action(world.whole))  # type: ignore[misc]
        expect(f"{name} while {state}", (error, at_once), (GroupReleasedError.__name__, True))
        assert f"communicator is {state}" in text, text
    error, _, at_once = refusal(lambda: exchange(world.whole, 10, dist.batch_isend_irecv))
    expect(f"a batch while {state}", (error, at_once), (GroupReleasedError.__name__, True))
    expect("open blocks", len(dist.distributed_c10d._world.pg_coalesce_state), 0)
    return len(actions) + 1


def compare_collectives(world: World, turn: Callable[[], None]) -> None:
    for name, collective in COLLECTIVES.items():
        turn()
        for group in (world.whole, world.twin):
            expect(f"{name} over {group.description}", collective(group), collective(world.plain))


@check
def collectives(world: World) -> Any:
    compare_collectives(world, lambda: None)
    return str(world.whole.communicator)


@check
def collectives_after_rebuilds(world: World) -> Any:
    compare_collectives(world, world.rebuild)
    return str(world.whole.communicator)


@check
def collectives_over_one_shared_and_capped(world: World) -> Any:
    world.agree()
    registry.rewire(Wiring(share=True, cold_max_ctas=2, hot_max_ctas=4))
    world.agree()
    assert world.whole.communicator is world.twin.communicator
    try:
        compare_collectives(world, world.rebuild)
        tensors = [values(group) for group in (world.whole, world.twin) * 2]
        groups = (world.whole, world.twin) * 2
        for work in [
            dist.all_reduce(t, group=g, async_op=True) for t, g in zip(tensors, groups, strict=True)
        ]:
            work.wait()
        assert all(torch.equal(tensors[0], tensor) for tensor in tensors)
        cap = options_of(world.whole.communicator).config.max_ctas if world.library is Library.NCCL else None
    finally:
        world.agree()
        registry.rewire(Wiring())
        world.agree()
    assert world.whole.communicator is not world.twin.communicator
    expect(
        "sum over groups that share no more",
        (total(world.whole), total(world.twin)),
        (whole_sum(), whole_sum()),
    )
    return {"max_ctas while shared": cap}


@check
def training_with_rebuilds_between(world: World) -> Any:
    expected = training(world.plain, lambda: None)
    expect("training", training(world.whole, world.rebuild), expected)
    return expected[:3]


@check
def a_released_group_raises_at_once(world: World) -> Any:
    total(world.whole)
    world.agree()
    release(registry.communicators())
    try:
        return expect_refused(world, CommunicatorState.RELEASED)
    finally:
        world.agree()
        for each in registry.communicators():
            each.build()
        world.agree()
        expect("sum afterwards", total(world.whole), whole_sum())


@check
def a_release_gives_memory_back(world: World) -> Any:
    world.need_nccl()
    total(world.whole)
    communicator = world.whole.communicator
    held = communicator.memory_bytes()
    world.agree()
    before = used_bytes()
    world.agree()
    communicator.release()
    world.agree()
    after = used_bytes()
    expect("memory", (communicator.memory_bytes(), communicator.used), (0, False))
    assert communicator.restore_use, "a restore has to run a first collective"
    assert before - after > 8 * MIB, f"freed {(before - after) / MIB:.0f} MiB"
    world.agree()
    communicator.build()
    world.agree()
    assert not communicator.used, "NCCL makes its communicator at the first collective"
    expect("sum", total(world.whole), whole_sum())
    return {"freed on the GPU": before - after, "held by NCCL": held}


@check
def suspend_and_resume(world: World) -> Any:
    world.need_nccl()
    communicator = world.whole.communicator
    total(world.whole)
    world.agree()
    held, before = communicator.memory_bytes(), used_bytes()
    world.agree()
    version = nccl.runtime_version() or ()
    if version < nccl.FIRST_WITH_SUSPEND:
        error, text, _ = refusal(communicator.suspend)
        expect("suspend", error, UnsupportedDispositionError.__name__)
        assert "2.29.7" in text, text
        expect("sum", total(world.whole), whole_sum())
        raise NotHereError(f"NCCL {version} cannot suspend; refused as it should be")
    communicator.suspend()
    world.agree()
    after = used_bytes()
    expect("state", communicator.state, CommunicatorState.SUSPENDED)
    number = expect_refused(world, CommunicatorState.SUSPENDED)
    assert before - after > 8 * MIB, f"freed {(before - after) / MIB:.0f} MiB"
    world.agree()
    communicator.resume()
    world.agree()
    for name in ("reductions", "movements"):
        expect(f"{name} after it", COLLECTIVES[name](world.whole), COLLECTIVES[name](world.plain))
    return {"freed on the GPU": before - after, "held by NCCL": held, "refused": number}


def settings(group: ManagedGroup) -> list[Any]:
    options = options_of(group.communicator)
    config = options.config
    return [
        options._timeout.total_seconds(),
        options.is_high_priority_stream,
        config.max_ctas,
        config.min_ctas,
        config.cga_cluster_size,
        group.description,
    ]


@check
def options_survive_rebuilds(world: World) -> Any:
    world.need_nccl()
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options.config.max_ctas, options.config.min_ctas, options.config.cga_cluster_size = 3, 2, 2
    group = world.new("DATA_PARALLEL_GROUP", 2 * TIMEOUT, pg_options=options)
    made = settings(group)
    expect("settings", made, [2 * TIMEOUT.total_seconds(), True, 3, 2, 2, "DATA_PARALLEL_GROUP"])
    for turn in range(2):
        world.rebuild()
        expect(f"after rebuild {turn}", settings(group), made)
        expect("sum", total(group), whole_sum())
    # A higher cap changes nothing; a lower one wins, and goes again.
    caps = {}
    for cap in (8, 1, None):
        world.agree()
        registry.rewire(Wiring(cold_max_ctas=cap, hot_max_ctas=cap))
        world.agree()
        caps[str(cap)] = settings(group)[2:4]
        expect("sum", total(group), whole_sum())
    group.set_timeout(3 * TIMEOUT)
    world.rebuild()
    expect("a new time limit", settings(group)[0], 3 * TIMEOUT.total_seconds())
    dist.destroy_process_group(group)
    return {"made": made, "by cap": caps}


@check
def caps_take_less_memory(world: World) -> Any:
    world.need_nccl()
    held = {}
    for cap in (None, 4, 1):
        world.agree()
        registry.rewire(Wiring(cold_max_ctas=cap, hot_max_ctas=cap))
        world.agree()
        before = used_bytes()
        world.agree()
        expect("sum", total(world.twin), whole_sum())
        world.agree()
        held[str(cap)] = [used_bytes() - before, world.twin.communicator.memory_bytes()]
        world.agree()
        release([world.twin.communicator])
        world.agree()
        world.twin.communicator.build()
    registry.rewire(Wiring())
    world.agree()
    assert held["1"][0] <= held["4"][0] <= held["None"][0], held
    assert held["1"][0] < held["None"][0], held
    return held


@check
def a_bound_device_survives_rebuilds(world: World) -> Any:
    world.need_nccl()
    if "device_id" not in inspect.signature(dist.new_group).parameters:
        raise NotHereError("this release of torch binds no device to a new group")
    group = world.new("PIPELINE_MODEL_PARALLEL_GROUP", device_id=device())
    seen = [[str(group.options.device), str(group.communicator.inner.bound_device_id)]]
    expect("sum", total(group), whole_sum())
    for _ in range(2):
        world.rebuild()
        seen.append([str(group.options.device), str(group.communicator.inner.bound_device_id)])
        group.communicator.connect()
        assert group.communicator.used, "connected before the first collective"
        expect("sum", total(group), whole_sum())
    for each in seen[1:]:
        expect("device", each, [str(device())] * 2)
    world.agree()
    dist.destroy_process_group(group)
    return seen


@check
def a_group_of_one_rank_is_torchs_own(world: World) -> Any:
    groups = [dist.new_group([rank], backend=BACKEND_NAME) for rank in range(world.size)]
    mine = groups[world.rank]
    assert type(mine) is ProcessGroup
    assert mine not in registry.managed()
    world.rebuild()
    expect("sum", total(mine), 1.0)
    return type(mine).__name__
