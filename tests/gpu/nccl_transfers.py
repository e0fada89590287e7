"""Checks of messages between ranks and of the ways to export weights."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from nccl_collectives import device, values, zeros
from nccl_world import (
    MIB,
    NotHereError,
    World,
    check,
    communicators_made,
    exchange,
    expect,
    options_of,
    refusal,
    total,
    used_bytes,
    whole_sum,
)
from torch.distributed import ProcessGroup

from pitstop.plan import Export
from pitstop_runtime.errors import GroupReleasedError, UnsupportedDispositionError
from pitstop_runtime.groups import Library, PeerCopies, Wiring, copies, p2p, registry, release


@check
def batches_are_coalesced(world: World) -> Any:
    world.need_nccl()
    events: list[str] = []
    kept = {name: getattr(ProcessGroup, name) for name in ("_start_coalescing", "_end_coalescing")}
    group_class: Any = ProcessGroup

    def noted(name: str) -> Any:
        def call(group: ProcessGroup, *arguments: Any) -> Any:
            events.append(name)
            return kept[name](group, *arguments)

        return call

    before = 10.0 * ((world.rank - 1) % world.size)
    expected = [1, [[before, before], [before + 1, before + 1]]]
    for name in kept:
        setattr(group_class, name, noted(name))
    world.whole.follow()  # a handle keeps the methods that it found
    try:
        total(world.plain), total(world.whole)
        made = communicators_made()
        assert made > 0, "NCCL's log is not read"
        # More than what NCCL sends without the other side: uncoalesced, the first message would wait for ever.
        for group in (world.plain, world.whole):
            for count in (10, 16 * MIB):
                expect(f"a batch of {count}", exchange(group, count, dist.batch_isend_irecv), expected)
        expect("blocks", events, ["_start_coalescing", "_end_coalescing"] * 4)
        expect("communicators made for batches", communicators_made() - made, 0)
        world.rebuild()
        expect("sum", total(world.whole), whole_sum())
        made = communicators_made()
        expect("after a rebuild", exchange(world.whole, MIB, dist.batch_isend_irecv), expected)
        expect("communicators made after a rebuild", communicators_made() - made, 0)
    finally:
        for name, method in kept.items():
            setattr(group_class, name, method)
        world.whole.follow()
    return {"function replaced": p2p.needed(), "communicators so far": made}


@check
def torchs_own_batches_over_a_handle_are_not(world: World) -> Any:
    """Why one function is replaced: message by message, NCCL makes communicators of pairs."""
    world.need_nccl()
    if not p2p.needed():
        raise NotHereError("this release of torch coalesces over a handle by itself")
    total(world.whole)
    made = communicators_made()
    other, tensor = world.rank ^ 1, torch.full((10,), float(world.rank), device=device())
    received = zeros(10)
    if other < world.size:
        sends = dist.P2POp(dist.isend, tensor, group=world.whole, group_peer=other)
        receives = dist.P2POp(dist.irecv, received, group=world.whole, group_peer=other)
        # In an order in which nobody waits for the other.
        operations = [sends, receives] if world.rank < other else [receives, sends]
        for work in p2p._torch_batch_isend_irecv(operations):
            work.wait()
        expect("received", received.tolist(), [float(other)] * 10)
    more = communicators_made() - made
    assert more >= 1, "then nothing would have to be replaced"
    world.rebuild()
    return {"communicators of pairs": more}


@check
def export_by_copies(world: World) -> Any:
    half, copies.HALF_BYTES = copies.HALF_BYTES, MIB
    world.agree()
    try:
        registry.rewire(Wiring(export=Export.COPIES))
        world.agree()
        release(registry.communicators())
        (export,) = registry.exports()
        assert isinstance(export, PeerCopies)
        world.agree()
        seen = []
        for turn in range(4):
            export.open()
            registry.route_to_export(True)
            for count in (1, 1000, MIB // 4, MIB // 4 + 1, 3 * MIB + 7):
                for dtype in (torch.float32, torch.bfloat16):
                    expect(
                        f"{count} {dtype}",
                        gathered(world.whole, count, dtype),
                        gathered(world.plain, count, dtype),
                    )
            tensor = values(world.whole)
            dist.all_reduce(tensor, group=world.whole)
            again = values(world.plain)
            dist.all_reduce(again, group=world.plain)
            expect("all_reduce", tensor.tolist(), again.tolist())
            dist.barrier(group=world.whole)
            error, text, _ = refusal(
                lambda: dist.all_to_all_single(zeros(world.size), zeros(world.size), group=world.whole)
            )
            expect("all_to_all_single", error, UnsupportedDispositionError.__name__)
            assert "export: communicator" in text, text
            registry.route_to_export(False)
            export.close()
            del tensor, again
            world.agree()
            expect("used after closing", export.used, False)
            expect(
                "refused after closing", refusal(lambda: total(world.whole))[0], GroupReleasedError.__name__
            )
            if turn and world.library is Library.NCCL:
                gc.collect()
                torch.cuda.empty_cache()
                world.agree()
                seen.append([torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), used_bytes()])
                world.agree()
        if seen:
            expect("allocated after each sync", seen[-1][0], seen[0][0])
            assert abs(seen[-1][2] - seen[0][2]) < 4 * MIB, f"device memory after each sync: {seen}"
    finally:
        copies.HALF_BYTES = half
        world.agree()
        registry.rewire(Wiring())
        for each in registry.communicators():
            each.build()
        world.agree()
    expect("sum afterwards", total(world.whole), whole_sum())
    return seen


def gathered(group: ProcessGroup, count: int, dtype: torch.dtype) -> list[Any]:
    """Checksums of what the collectives of an export give."""
    mine = (torch.arange(count, device=device()) % 251 + group.rank()).to(dtype)
    rows = [torch.zeros_like(mine) for _ in range(group.size())]
    whole, sent = torch.zeros(count * group.size(), dtype=dtype, device=device()), mine.clone()
    dist.all_gather(rows, mine, group=group)
    work = dist.all_gather_into_tensor(whole, mine * 2, group=group, async_op=True)
    work.wait()
    dist.broadcast(sent, group=group, group_src=1)
    weights = torch.arange(1, count + 1, device=device(), dtype=torch.float64)

    def digest(tensor: torch.Tensor) -> list[float]:
        return [float((tensor.double() * weights).sum()), float(tensor[-1])]

    return [digest(each) for each in (*rows, *whole.chunk(group.size()), sent)]


@check
def export_over_a_communicator(world: World) -> Any:
    world.agree()
    registry.rewire(Wiring(export=Export.COMMUNICATOR, export_max_ctas=4))
    world.agree()
    release(registry.communicators())
    registry.route_to_export(True)
    expect("gathered", gathered(world.whole, 3000, torch.float32), gathered(world.plain, 3000, torch.float32))
    (export,) = registry.exports()
    cap = options_of(export).config.max_ctas if world.library is Library.NCCL else 4
    world.agree()
    registry.route_to_export(False)
    expect("refused", refusal(lambda: total(world.whole))[0], GroupReleasedError.__name__)
    registry.rewire(Wiring())
    for each in registry.communicators():
        each.build()
    world.agree()
    expect("cap", cap, 4)
    expect("sum afterwards", total(world.whole), whole_sum())
    return cap
