"""Checks of unusual ends of communicators; they come last, for what a failure leaves behind."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from nccl_collectives import device
from nccl_world import NotHereError, World, check, expect, refusal, total, whole_sum

from pitstop_runtime.errors import GroupReleasedError
from pitstop_runtime.groups import nccl


@check
def a_suspended_communicator_can_be_destroyed(world: World) -> Any:
    world.need_nccl()
    if (nccl.runtime_version() or ()) < nccl.FIRST_WITH_SUSPEND:
        raise NotHereError("this NCCL cannot suspend")
    group = world.new("DATA_PARALLEL_GROUP")
    total(group)
    world.agree()
    group.communicator.suspend()
    world.agree()
    begun = time.monotonic()
    group.communicator.release()
    seconds = time.monotonic() - begun
    world.agree()
    group.communicator.build()
    world.agree()
    expect("sum", total(group), whole_sum())
    world.agree()
    dist.destroy_process_group(group)
    return round(seconds, 2)


@check
def an_abort_ends_what_waits(world: World) -> Any:
    """The last check: a collective to which one rank does not come is broken off."""
    world.need_nccl()
    group = world.new("DATA_PARALLEL_GROUP")
    expect("sum", total(group), whole_sum())
    world.agree()
    begun = time.monotonic()
    if world.rank:
        dist.all_reduce(torch.ones(1000, device=device()), group=group, async_op=True)
        time.sleep(0.5)
    group.communicator.abort()
    error, text, at_once = refusal(lambda: total(group))
    expect("after the abort", (error, at_once), (GroupReleasedError.__name__, True))
    assert "broken" in text, text
    group.communicator.release()
    dist.barrier(group=world.control)
    group.communicator.build()
    dist.barrier(group=world.control)
    expect("sum after a rebuild", total(group), whole_sum())
    return round(time.monotonic() - begun, 1)
