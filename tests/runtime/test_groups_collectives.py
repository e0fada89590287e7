"""Every collective of ``torch.distributed`` over managed groups gives what it gives over torch's own gloo groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_collectives import CHECKS, values
from group_world import Way, World
from rank_server import on_ranks

pytestmark = pytest.mark.megatron


def case_every_collective(way: str) -> list[str]:
    """What differs from torch's own groups, with a turn before each collective."""
    plain, managed = World(Way.PLAIN), World(Way(way))
    differences = []
    for name, check in CHECKS.items():
        managed.turn()
        for own, torchs in zip(managed.mine(), plain.mine(), strict=True):
            expected, found = check(torchs), check(own)
            if found != expected:
                differences.append(f"{name} over {own.group_desc}: {found} instead of {expected}")
    return differences


@pytest.mark.parametrize("way", [Way.FRESH, Way.REBUILT, Way.SHARED, Way.REWIRED])
def test_collectives_give_what_plain_gloo_gives(way: Way) -> None:
    assert on_ranks(case_every_collective, 4, way) == [[]] * 4


def case_two_groups_at_once() -> Any:
    world = World(Way.SHARED)
    assert world.whole.communicator is world.twin.communicator
    tensors = [values(group) for group in (world.whole, world.twin) * 3]
    groups = [world.whole, world.twin] * 3
    works = [
        dist.all_reduce(tensor, group=group, async_op=True)
        for tensor, group in zip(tensors, groups, strict=True)
    ]
    for work in works:
        work.wait()
    gathered = [torch.zeros(12) for _ in range(world.size)]
    dist.all_gather(gathered, values(world.twin), group=world.twin)
    return [tensors[0].tolist(), all(torch.equal(tensors[0], each) for each in tensors), len(gathered)]


def test_collectives_of_groups_that_share_a_communicator_may_be_under_way_together() -> None:
    total = sum(10 * (rank + 1) for rank in range(3))
    expected = [float(3 * number + total) for number in range(12)]
    assert on_ranks(case_two_groups_at_once, 3) == [[expected, True, 3]] * 3
