"""Batches of messages over managed groups are coalesced, as over torch's own: once opened, once closed.

Gloo coalesces nothing. So a stand-in says that it does, counts what torch asks for, and carries the messages.
``tests/gpu`` has the same with NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_world import Way, World
from rank_server import on_ranks
from torch.distributed import ProcessGroup

from pitstop_runtime.errors import GroupReleasedError
from pitstop_runtime.groups import p2p, registry, release

pytestmark = pytest.mark.megatron

RANKS = 3
ONCE = ["start", "send", "recv", "send", "recv", "end"]
NEVER = ["send", "recv", "send", "recv"]


class _All(dist.Work):
    """Waits for all messages of a block."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        del timeout
        return all(work.wait() for work in self._works)


class Coalescing:
    """Stands in for a library that coalesces, on the class of torch's own groups."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._works: list[Any] = []
        self._kept = {name: getattr(ProcessGroup, name) for name in ("send", "recv")}
        group: Any = ProcessGroup
        group._start_coalescing = lambda _, device: self._start(device)
        group._end_coalescing = lambda _, device: self._end(device)
        group.send, group.recv = self._counted("send"), self._counted("recv")
        gloo: Any = dist.ProcessGroupGloo
        gloo.supports_coalescing = True

    def seen(self) -> list[str]:
        """What was asked for since the last time."""
        events, self.events = self.events, []
        return events

    def _start(self, device: torch.device) -> None:
        assert device.type == "cpu"
        assert self._works == []
        self.events.append("start")

    def _end(self, _: torch.device) -> _All:
        self.events.append("end")
        works, self._works = self._works, []
        return _All(works)

    def _counted(self, name: str) -> Callable[..., Any]:
        def call(group: ProcessGroup, *arguments: Any) -> Any:
            self.events.append(name)
            work = self._kept[name](group, *arguments)
            self._works.append(work)
            return work

        return call


def exchange(group: ProcessGroup, batch: Callable[..., Any]) -> list[Any]:
    """Two messages to the next rank and two from the one before, as a pipeline does; how many requests, and both."""
    size, rank = group.size(), group.rank()
    received = [torch.zeros(4), torch.zeros(4)]
    operations = []
    for number, tensor in enumerate(received):
        sent = torch.full((4,), 10.0 * rank + number)
        operations += [
            dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, tensor, dist.get_global_rank(group, (rank - 1) % size), group=group),
        ]
    works = batch(operations)
    for work in works:
        work.wait()
    return [len(works), [float(tensor[3]) for tensor in received]]


def case_exchanges() -> dict[str, Any]:
    plain, world = World(Way.PLAIN), World(Way.FRESH)
    library = Coalescing()
    for handle in registry.managed():
        handle.follow()  # it keeps the methods that it found
    found: dict[str, Any] = {}
    for name, group in {
        "plain": plain.whole,
        "managed": world.whole,
        "whole world": dist.group.WORLD,
    }.items():
        found[name] = [exchange(group, dist.batch_isend_irecv), library.seen()]
    if world.part is not None:
        found["part"] = [exchange(world.part, dist.batch_isend_irecv), library.seen()]
    world.rebuild()
    found["rebuilt"] = [exchange(world.whole, dist.batch_isend_irecv), library.seen()]
    torchs = p2p._torch_batch_isend_irecv
    found["torch's over a plain group"] = [exchange(plain.whole, torchs), library.seen()]
    found["torch's"] = [exchange(world.whole, torchs), library.seen()]
    return found


def test_a_batch_is_coalesced_as_over_a_plain_group() -> None:
    for rank, found in enumerate(on_ranks(case_exchanges, RANKS)):
        before = 10.0 * ((rank - 1) % RANKS)
        expected = [[1, [before, before + 1]], ONCE]
        for name in ("plain", "managed", "whole world", "rebuilt", "torch's over a plain group"):
            assert found[name] == expected, name
        if rank:
            assert found["part"] == [[1, [10.0 * (2 - rank), 10.0 * (2 - rank) + 1]], ONCE]
        # The reason for a function of our own: over the handle, older releases of torch coalesce nothing.
        assert found["torch's"] == ([[4, [before, before + 1]], NEVER] if p2p.needed() else expected)


def case_replaced() -> list[Any]:
    """What is replaced in ``torch.distributed`` once groups exist."""
    c10d = dist.distributed_c10d
    foreign = [
        name
        for module in (dist, c10d)
        for name in dir(module)
        if str(getattr(getattr(module, name), "__module__", "")).startswith("pitstop")
    ]
    return [foreign, dist.batch_isend_irecv is c10d.batch_isend_irecv]


def test_no_other_function_of_torch_is_replaced_and_this_one_only_where_it_must_be() -> None:
    new_enough = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
    assert p2p.needed() is not new_enough
    expected = [] if new_enough else ["batch_isend_irecv"] * 2
    assert on_ranks(case_replaced, 2) == [[expected, True]] * 2


def raised(action: Callable[..., Any], *arguments: Any) -> str:
    try:
        action(*arguments)
    except Exception as error:
        return type(error).__name__
    return "nothing"


def case_misuse() -> list[Any]:
    world, other = World(Way.FRESH), dist.new_group()
    batch = dist.batch_isend_irecv
    operations = [
        dist.P2POp(dist.isend, torch.ones(1), group=group, group_peer=0) for group in (world.whole, other)
    ]
    found = [raised(batch, tuple(operations[:1])), raised(batch, [1]), raised(batch, operations)]
    release(registry.communicators())
    found.append(raised(exchange, world.whole, batch))
    return [*found, len(dist.distributed_c10d._world.pg_coalesce_state)]


def test_what_is_no_proper_batch_is_refused_as_by_torch() -> None:
    expected = [*["ValueError"] * 3, GroupReleasedError.__name__, 0]
    assert on_ranks(case_misuse, 2) == [expected] * 2
