"""A collective on a group without a live communicator fails at once and says why; afterwards nothing is amiss."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_collectives import CHECKS, values
from group_world import Way, World
from rank_server import on_ranks
from torch.distributed import ProcessGroup

from pitstop_runtime.errors import GroupReleasedError
from pitstop_runtime.groups import CommunicatorState, registry, release

pytestmark = pytest.mark.megatron

RANKS = 3
AT_ONCE_S = 10.0  # far below the time limit of a collective, and far above what a busy machine takes


def coalesced_on_a_device(group: ProcessGroup) -> Any:
    """The old way of coalescing, which NCCL has."""
    with dist.distributed_c10d._coalescing_manager(group, torch.device("cpu")):
        dist.all_reduce(values(group), group=group)


def functional(group: ProcessGroup) -> Any:
    """Through C++ and back."""
    import torch.distributed._functional_collectives as funcol

    return funcol.all_reduce(values(group), "sum", group).tolist()


def refusal(action: Callable[[], Any]) -> list[Any]:
    """What an action raises, and whether at once."""
    begun = time.monotonic()
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - begun < AT_ONCE_S]
    return ["nothing", "", True]


def case_collectives_without_a_communicator(state: str) -> dict[str, Any]:
    world = World(Way.FRESH)
    checks = {name: check for name, check in CHECKS.items() if name != "names_and_ranks"}
    before = {name: [check(group) for group in world.mine()] for name, check in checks.items()}
    if state == CommunicatorState.RELEASED:
        release(registry.communicators())
    else:  # gloo cannot be suspended: what a handle does is the same
        for each in registry.communicators():
            each._enter(CommunicatorState.SUSPENDED)
    refusals = {
        name: refusal(partial(check, world.whole))
        for name, check in {**checks, "device": coalesced_on_a_device, "functional": functional}.items()
    }
    members = CHECKS["names_and_ranks"](world.whole)["ranks"]
    for each in registry.communicators():
        each.build() if state == CommunicatorState.RELEASED else each._enter(CommunicatorState.LIVE)
    after = {name: [check(group) for group in world.mine()] for name, check in checks.items()}
    return {
        "refusals": refusals,
        "members": members,
        "name": world.whole.group_name,
        "differ": [name for name in before if before[name] != after[name]],
        "coalescing": len(dist.distributed_c10d._world.pg_coalesce_state),
    }


@pytest.mark.parametrize("state", [CommunicatorState.RELEASED, CommunicatorState.SUSPENDED])
def test_every_collective_without_a_communicator_fails_at_once(state: CommunicatorState) -> None:
    for found in on_ranks(case_collectives_without_a_communicator, RANKS, state):
        assert len(found["refusals"]) > 18
        for name, (error, text, at_once) in found["refusals"].items():
            if name == "gather_single" and error == "nothing":
                continue  # torch is older than that
            assert error == GroupReleasedError.__name__, f"{name}: {error} {text}"
            assert at_once, name
            who = f"process group TENSOR_MODEL_PARALLEL_GROUP (name '{found['name']}', ranks [0, 1, 2])"
            assert who in text
            assert f"communicator is {state}" in text
            assert "wake_up()" in text
        assert found["members"] == [0, 1, 2], "who the members are can be asked at any time"
        # A refused collective leaves nothing behind.
        assert found["differ"] == []
        assert found["coalescing"] == 0


def case_aborted() -> list[Any]:
    world = World(Way.FRESH)
    world.whole.communicator.abort()
    return refusal(lambda: dist.all_reduce(torch.ones(1), group=world.whole))


def test_a_collective_on_an_aborted_group_says_why() -> None:
    for error, text, at_once in on_ranks(case_aborted, 2):
        assert error == GroupReleasedError.__name__
        assert at_once
        assert "communicator is broken. It was broken off after an error" in text


def case_barrier() -> str:
    group = World(Way.FRESH).twin
    release([group.communicator])
    return str(refusal(lambda: dist.barrier(group=group))[1])


def test_the_error_names_the_collective() -> None:
    assert all(text.startswith("barrier on process group MODEL_") for text in on_ranks(case_barrier, 2))
