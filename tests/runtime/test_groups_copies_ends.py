"""The ends of an export by copies: nothing is held after it, and nobody waits in vain."""

from __future__ import annotations

import gc
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_copies import RANKS, SOON_S, numbers, raised, world_of_copies
from group_world import Way, World
from rank_server import on_ranks

from pitstop.plan import Export
from pitstop_runtime.errors import GroupReleasedError, SwitchError, UnsupportedDispositionError
from pitstop_runtime.groups import (
    CommunicatorState,
    Wiring,
    peer_memory,
    registry,
)

pytestmark = pytest.mark.megatron


def held() -> list[int]:
    """Open files, buffers mapped, and files in the folder of temporary ones, of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("pitstop-")
    folder = len(list(Path(tempfile.gettempdir()).glob("pitstop-*")))
    return [len(list(Path("/proc/self/fd").iterdir())), maps, folder]


def case_open_and_close(folder: str) -> dict[str, Any]:
    tempfile.tempdir = folder
    world, export = world_of_copies()
    used = [export.used, export.memory_bytes()]
    world.agree()
    before = held()
    found: dict[str, Any] = {"closed": [], "open": [], "sums": []}
    export.close()  # of what is not open
    for _ in range(3):
        export.open()
        gathering = export.inner
        export.open()
        assert export.inner is gathering
        registry.route_to_export(True)
        total = torch.ones(1)
        dist.all_reduce(total, group=world.whole)
        world.agree()
        used.append(export.used)
        found["sums"].append(float(total))
        found["open"].append(held()[1:])
        world.agree()
        export.close()
        found["refused"] = raised(dist.all_reduce, total, group=world.whole)
        assert gathering._halves == []
        assert "_shared" not in vars(gathering)
        del gathering
        export.close()
        registry.route_to_export(False)
        world.agree()
        after = held()
        world.agree()  # the next one is not opened yet
        found["closed"].append([after[1:], abs(after[0] - before[0]) < 5])
        used.append(export.used)
    export.release()
    export.release()
    export.close()
    export.open()
    found["released"] = [export.state, export.used, raised(lambda: export.inner)[0]]
    export.build()
    export.build()
    export.open()
    found["rebuilt"] = float(export.inner.allreduce([torch.ones(1)]).result()[0])
    export.release()  # while open
    found["ended"] = [export.state, export.used, held()[1:]]
    return {**found, "used": used}


def test_opening_and_closing_again_does_nothing_and_nothing_is_held(tmp_path: Path) -> None:
    for found in on_ranks(case_open_and_close, RANKS, str(tmp_path)):
        assert found["sums"] == [RANKS] * 3
        # Mapped by every rank, and without a name that would outlive a crash.
        assert all(maps >= RANKS and names == 0 for maps, names in found["open"])
        assert found["closed"] == [[[0, 0], True]] * 3
        assert found["used"] == [False, 0, *[True, False] * 3]
        assert found["refused"][0] == GroupReleasedError.__name__
        assert "inside update_weights()" in found["refused"][1]
        assert found["released"] == ["released", False, "RuntimeError"]
        assert found["rebuilt"] == RANKS
        assert found["ended"] == ["released", False, [0, 0]]


def case_one_cannot(what: str, folder: str) -> list[Any]:
    """The second rank fails at one thing: what all of them raise, how soon, what is held, and a later try."""
    tempfile.tempdir = folder
    begun = time.monotonic()
    world = World(Way.FRESH)
    memory: Any = peer_memory.SharedBuffer
    kept = {"map": memory.map, "make": memory.make, "gethostname": socket.gethostname}

    def fail(*_: object) -> Any:
        raise RuntimeError("CUDA error: peer access is not supported between these two devices")

    if world.rank == 1:
        if what == "node":
            socket.gethostname = lambda: "elsewhere"
        else:
            setattr(memory, what, staticmethod(fail))
    found = raised(registry.rewire, Wiring(export=Export.COPIES))
    (export,) = registry.exports()
    if what != "node":
        assert found[0] == "nothing"
        found = raised(export.open)
    found += [export.used, raised(lambda: export.inner)[0], time.monotonic() - begun < SOON_S, held()[1:]]
    world.agree()
    memory.map, memory.make = staticmethod(kept["map"]), kept["make"]
    socket.gethostname = kept["gethostname"]
    export.build()
    export.open()
    found.append(float(export.inner.allreduce([torch.ones(1)]).result()[0]))
    export.release()
    return found


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("map", "rank 1 cannot map the buffer of rank 0: CUDA error: peer access is not supported"),
        ("make", "rank 1 cannot make a buffer: CUDA error"),
        ("node", "on elsewhere"),
    ],
)
def test_all_ranks_raise_together_if_one_cannot(what: str, why: str, tmp_path: Path) -> None:
    for error, text, used, inner, soon, left, total in on_ranks(case_one_cannot, RANKS, what, str(tmp_path)):
        assert error == UnsupportedDispositionError.__name__
        assert why in text
        assert "CUDA_VISIBLE_DEVICES" in text
        assert "export: communicator, or training" in text
        assert (used, inner, soon, left) == (False, "RuntimeError", True, [0, 0])
        assert total == RANKS


def case_one_leaves(how: str) -> list[Any]:
    """The second rank gives up, or stops, in the middle of a sync; what the others get, and whether soon."""
    world, export = world_of_copies()
    export.open()
    registry.route_to_export(True)
    dist.barrier(group=world.whole)
    if world.rank == 1:
        if how == "gives up":
            export.abort()
            export.release()
        else:
            time.sleep(2)
            export.abort()
            export.release()
        return ["left"]
    begun = time.monotonic()
    if how == "stops":  # as the executor does for all when one rank fails
        threading.Timer(0.5, export.abort).start()
    gathered = [torch.zeros(100) for _ in range(world.size)]
    found = raised(dist.all_gather, gathered, numbers(100), group=world.whole)
    export.abort()
    again = raised(dist.all_gather, gathered, numbers(100), group=world.whole)
    registry.route_to_export(False)
    export.close()
    export.release()
    gc.collect()
    return [*found, again[0], export.used, export.state, time.monotonic() - begun < SOON_S]


@pytest.mark.parametrize("how", ["gives up", "stops"])
def test_nobody_waits_for_a_rank_that_left_a_sync(how: str) -> None:
    found = on_ranks(case_one_leaves, RANKS, how)
    for rank in (0, 2):
        error, text, again, used, state, soon = found[rank]
        assert error == SwitchError.__name__, text
        assert "TENSOR_MODEL_PARALLEL_GROUP" in text
        assert again == GroupReleasedError.__name__
        assert (used, state, soon) == (False, CommunicatorState.RELEASED, True)


def case_bare() -> Any:
    """Before anything is open."""
    world, export = world_of_copies()
    registry.route_to_export(True)
    found = raised(dist.all_reduce, torch.ones(1), group=world.whole)
    # What is live carries its own collectives, exporting or not.
    world.agree()
    world.whole.communicator.build()
    total = torch.ones(1)
    dist.all_reduce(total, group=world.whole)
    return [*found, float(total), raised(lambda: export.inner)]


def test_a_collective_before_the_sync_says_where_weights_are_gathered() -> None:
    for error, text, total, (inner, why) in on_ranks(case_bare, 2):
        assert error == GroupReleasedError.__name__
        assert "weights are gathered inside update_weights()" in text
        assert total == 2.0
        assert inner == "RuntimeError"
        assert "is not open" in why
