"""Weights gathered by copies between ranks: as plain gloo gathers them, and without anybody waiting in vain."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_copies import PART_BYTES, RANKS, numbers, opened, raised
from group_world import TIMEOUT, Way, World
from rank_server import on_ranks
from torch.distributed import ProcessGroup, ReduceOp

from pitstop.plan import Export
from pitstop_runtime.errors import UnsupportedDispositionError
from pitstop_runtime.groups import (
    Wiring,
    copies,
    peer_memory,
    registry,
    release,
)

pytestmark = pytest.mark.megatron

COUNTS = (0, 1, 15, 16, 17, 31, 32, 33, 48, 100)
"""Numbers of 4 bytes: none, within one part, at the ends of parts, and over many."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


def everything(group: ProcessGroup) -> dict[str, Any]:
    """What comes out of the collectives that exports use."""
    size, found = group.size(), {}
    for count in COUNTS:
        for dtype in DTYPES if count in (0, 17, 100) else DTYPES[:1]:
            gathered = [torch.zeros(count, dtype=dtype) for _ in range(size)]
            dist.all_gather(gathered, numbers(count, dtype), group=group)
            whole = torch.zeros(count * size, dtype=dtype)
            dist.all_gather_into_tensor(whole, numbers(count, dtype, 1), group=group)
            sent = [numbers(count, dtype) for _ in range(size)]
            for source, tensor in enumerate(sent):
                dist.broadcast(tensor, group=group, group_src=source)
            found[f"{count} {dtype}"] = [
                [each.tolist() for each in gathered],
                whole.tolist(),
                [each.tolist() for each in sent],
            ]
    for operator in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX):
        tensor = numbers(33)
        dist.all_reduce(tensor, operator, group=group)
        found[str(operator)] = tensor.tolist()
    found |= {"async": asynchronous(group), "coalesced": coalesced(group), "objects": objects(group)}
    dist.barrier(group=group)
    return found


def asynchronous(group: ProcessGroup) -> list[Any]:
    gathered = [torch.zeros(40) for _ in range(group.size())]
    whole, sent, summed = torch.zeros(40 * group.size()), numbers(40), numbers(40)
    works = [
        dist.all_gather(gathered, numbers(40), group=group, async_op=True),
        dist.all_gather_into_tensor(whole, numbers(40), group=group, async_op=True),
        dist.broadcast(sent, group=group, group_src=1, async_op=True),
        dist.all_reduce(summed, group=group, async_op=True),
        dist.barrier(group=group, async_op=True),
    ]
    for work in works:
        work.wait()
    futures = [each.tolist() for each in works[2].get_future().wait()]
    done = [[work.is_completed(), work.is_success()] for work in works]
    return [[each.tolist() for each in (*gathered, whole, sent, summed)], futures, done]


def coalesced(group: ProcessGroup) -> list[Any]:
    whole = [torch.zeros(count * group.size()) for count in (5, 40)]
    with dist.distributed_c10d._coalescing_manager(group):
        for tensor, count in zip(whole, (5, 40), strict=True):
            dist.all_gather_into_tensor(tensor, numbers(count), group=group)
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as later:
        dist.all_gather_into_tensor(whole[0], numbers(5, shift=2), group=group)
    later.wait()
    return [each.tolist() for each in whole]


def objects(group: ProcessGroup) -> list[Any]:
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, {"rank": group.rank(), "text": "x" * 100 * group.rank()}, group=group)
    shared = [{"from": group.rank()}]
    dist.broadcast_object_list(shared, group=group, group_src=1)
    return [gathered, shared]


def case_everything() -> list[str]:
    """Names of what differs from plain gloo."""
    with opened() as (world, export):
        plain = World(Way.PLAIN)
        expected, found = everything(plain.whole), everything(world.whole)
        assert world.whole._live is export.inner
        assert found.keys() == expected.keys()
        return [name for name in expected if found[name] != expected[name]]


def test_copies_give_what_plain_gloo_gives() -> None:
    assert on_ranks(case_everything, RANKS) == [[]] * RANKS


def case_shapes() -> list[str]:
    """Tensors that no library would take: strided ones, of types that cannot be summed, with gradients, of no size."""
    wrong = []

    def compare(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        if not torch.equal(found, expected):
            wrong.append(name)

    with opened() as (world, _):
        group, rank = world.whole, world.rank

        def value(of: int) -> torch.Tensor:
            return torch.arange(60.0).view(6, 10) + 100 * of

        strided = [torch.zeros(10, 6).t() for _ in range(RANKS)]
        dist.all_gather(strided, value(rank)[:, ::1].t().contiguous().t(), group=group)
        for of, tensor in enumerate(strided):
            assert not tensor.is_contiguous()
            compare(f"strided {of}", tensor, value(of))
        columns = [torch.zeros(6, 20)[:, ::2] for _ in range(RANKS)]
        dist.all_gather(columns, torch.stack([value(rank)] * 2)[1], group=group)
        for of, tensor in enumerate(columns):
            compare(f"columns {of}", tensor, value(of))
        whole = torch.zeros(10, 6 * RANKS).t()
        group._live._allgather_base(whole, value(rank)).wait()
        compare("whole", whole, torch.cat([value(of) for of in range(RANKS)]))
        sent = value(rank).t()
        dist.broadcast(sent, group=group, group_src=2)
        compare("broadcast", sent, value(2).t())
        # Of different sizes.
        uneven = [torch.zeros(50 * (of + 1)) for of in range(RANKS)]
        dist.all_gather(uneven, torch.full((50 * (rank + 1),), float(rank)), group=group)
        for of, tensor in enumerate(uneven):
            compare(f"uneven {of}", tensor, torch.full((50 * (of + 1),), float(of)))
        scalar = [torch.zeros(()) for _ in range(RANKS)]
        dist.all_gather(scalar, torch.tensor(float(rank)), group=group)
        compare("scalar", torch.stack(scalar), torch.arange(float(RANKS)))
        for dtype in (torch.bool, torch.complex64, torch.float8_e4m3fn):
            gathered = [torch.zeros(30).to(dtype) for _ in range(RANKS)]
            dist.all_gather(gathered, (torch.arange(30) % (rank + 2)).to(dtype), group=group)
            for of, tensor in enumerate(gathered):
                compare(f"{dtype} {of}", tensor.float(), (torch.arange(30) % (of + 2)).to(dtype).float())
        # In place: the input is a part of the output.
        place = torch.zeros(RANKS, 30)
        place[rank] = rank + 1.0
        dist.all_gather_into_tensor(place, place[rank], group=group)
        compare("in place", place[:, 3], torch.arange(1.0, RANKS + 1))
        weight = torch.nn.Parameter(torch.full((30,), float(rank)))
        gathered = [torch.zeros(30, requires_grad=True) for _ in range(RANKS)]
        dist.all_gather(gathered, weight, group=group)
        compare("parameter", gathered[2].detach(), torch.full((30,), 2.0))
        mean = torch.full((3,), float(rank))
        dist.all_reduce(mean, ReduceOp.AVG, group=group)
        compare("mean", mean, torch.ones(3))
    return wrong


def test_any_tensor_can_be_copied() -> None:
    assert on_ranks(case_shapes, RANKS) == [[]] * RANKS


def case_part_of_the_world() -> list[Any]:
    """A group whose numbers are not those of the world."""
    copies.HALF_BYTES = PART_BYTES
    group = dist.new_group([1, 2], TIMEOUT, group_desc="PIPELINE_MODEL_PARALLEL_GROUP")
    registry.rewire(Wiring(export=Export.COPIES))
    if dist.get_rank() == 0:
        return [registry.exports(), None]
    (export,) = registry.exports()
    release([group.communicator])
    export.open()
    registry.route_to_export(True)
    tensor = torch.full((40,), float(dist.get_rank()))
    dist.broadcast(tensor, 2, group=group)
    gathered = [torch.zeros(40), torch.zeros(40)]
    dist.all_gather(gathered, tensor + dist.get_rank(), group=group)
    registry.route_to_export(False)
    export.close()
    return [float(tensor[39]), [float(each[39]) for each in gathered]]


def test_copies_within_a_part_of_the_world() -> None:
    assert on_ranks(case_part_of_the_world, 3) == [[[], None], [2.0, [3.0, 4.0]], [2.0, [3.0, 4.0]]]


def case_others() -> dict[str, list[Any]]:
    with opened() as (world, _):
        group = world.whole
        tensor, rows = numbers(3), [torch.zeros(3) for _ in range(RANKS)]
        wide = torch.zeros(3 * RANKS)

        def block() -> None:
            with dist.distributed_c10d._coalescing_manager(group, torch.device("cpu")):
                dist.all_reduce(tensor, group=group)

        found = {
            "reduce": raised(dist.reduce, tensor, 0, group=group),
            "reduce_scatter": raised(dist.reduce_scatter, tensor, rows, group=group),
            "_reduce_scatter_base": raised(dist.reduce_scatter_tensor, tensor, wide, group=group),
            "alltoall": raised(dist.all_to_all, rows, rows, group=group),
            "alltoall_base": raised(dist.all_to_all_single, wide, wide, group=group),
            "gather": raised(
                dist.gather, tensor, rows if world.rank == 0 else None, group=group, group_dst=0
            ),
            "scatter": raised(
                dist.scatter, tensor, rows if world.rank == 0 else None, group=group, group_src=0
            ),
            "send": raised(dist.send, tensor, group=group, group_dst=(group.rank() + 1) % RANKS),
            "recv": raised(dist.recv, tensor, group=group, group_src=(group.rank() + 1) % RANKS),
            "_start_coalescing": raised(block),
            "all_reduce": raised(dist.all_reduce, tensor, ReduceOp.PRODUCT, group=group),
        }
        # Nothing is left behind of them.
        assert not dist.distributed_c10d._world.pg_coalesce_state
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert float(total) == RANKS
        found["sizes"] = raised(dist.all_gather_into_tensor, wide, numbers(4), group=group)
        found["types"] = raised(group._live.allgather, [rows], [numbers(3, torch.float64)])
        return found


def test_what_copies_cannot_carry_raises_and_says_what_to_do() -> None:
    for found in on_ranks(case_others, RANKS):
        for name in ("sizes", "types"):
            error, text = found.pop(name)
            assert error in ("ValueError", "RuntimeError"), text
        for name, (error, text) in found.items():
            assert error == UnsupportedDispositionError.__name__, f"{name}: {error} {text}"
            # Torch 2.14 has other names for some.
            assert name in text or "_single" in text
            assert "export: communicator, or training" in text
            assert "TENSOR_MODEL_PARALLEL_GROUP" in text


def test_the_device_is_where_torch_has_it() -> None:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert names[peer_memory._DEVICE_ARGUMENT] == "storage_device"
