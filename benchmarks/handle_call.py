"""What the handle of a managed group costs per collective call, against its budget of 5 microseconds.

Two ranks on this machine, over gloo with one thread. The same call is made over a handle and over the plain group of
torch's class below it, so that nothing but the handle differs; in one run and in turns, whose turn it is first
changing. Timed is the processor time of the calling thread until a call with ``async_op=True`` returns; what the
library's threads do then, and the wait, is not in it. Each round gives a median per group, hence one difference;
printed are the medians over all rounds, and between what 90 of 100 differences lie.

A functional collective comes from C++, and for any group that is defined in Python torch makes a detour through the
interpreter. That is no cost of the handle: there, the plain group is one behind the least such class that is possible.
The line before it shows the detour itself.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from pitstop_runtime.groups import BACKEND_NAME, ManagedGroup

BUDGET_US = 5.0
RANKS = 2
TIMEOUT = timedelta(seconds=60)
Call = Callable[[], Any]


class Bare(ProcessGroup):
    """The least that a process group defined in Python can be."""

    def __init__(self, below: ProcessGroup) -> None:
        super().__init__(below.rank(), below.size())
        self._below = below

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """As ``ProcessGroup.allreduce``."""
        return self._below.allreduce(tensors, opts)


@dataclass(frozen=True, slots=True)
class Pair:
    """The same call over two groups."""

    without: Call
    over: Call
    counts: bool = True
    """whether the budget is for the difference"""


def direct(managed: ManagedGroup, plain: ProcessGroup) -> dict[str, Pair]:
    """The collectives that training calls most, on tensors so small that the call is all."""
    small, wide = torch.ones(RANKS), torch.ones(2 * RANKS)
    listed = [torch.ones(RANKS) for _ in range(RANKS)]
    collectives: dict[str, Callable[[ProcessGroup], Any]] = {
        "all_reduce": lambda group: dist.all_reduce(small, group=group, async_op=True),
        "broadcast": lambda group: dist.broadcast(small, group=group, group_src=0, async_op=True),
        "all_gather": lambda group: dist.all_gather(listed, small, group=group, async_op=True),
        "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(
            wide, small, group=group, async_op=True
        ),
        "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(
            small, wide, group=group, async_op=True
        ),
    }

    def pair(collective: Callable[[ProcessGroup], Any]) -> Pair:
        return Pair(lambda: collective(plain), lambda: collective(managed))

    return {name: pair(collective) for name, collective in collectives.items()}


def functional(managed: ManagedGroup, plain: ProcessGroup, bare: Bare) -> dict[str, Pair]:
    """A functional collective, by the names of three groups."""
    small = torch.ones(RANKS)
    register: Any = torch._C._distributed_c10d._register_process_group
    register("benchmark-plain", plain)
    register("benchmark-bare", bare)

    def call(name: str) -> Call:
        return lambda: torch.ops._c10d_functional.all_reduce(small, "sum", name)

    return {
        "functional: the detour": Pair(call("benchmark-plain"), call("benchmark-bare"), counts=False),
        "functional: the handle": Pair(call("benchmark-bare"), call(managed.group_name)),
    }


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per call: one figure for each round."""

    without: list[float]
    over: list[float]

    @property
    def differences(self) -> list[float]:
        """Sorted."""
        return sorted(b - a for a, b in zip(self.without, self.over, strict=True))

    @property
    def median(self) -> float:
        """Of the differences."""
        return statistics.median(self.differences)

    def __str__(self) -> str:
        more = self.differences
        low, high = more[int(len(more) * 0.05)], more[int(len(more) * 0.95)]
        return (
            f"without {statistics.median(self.without):6.2f} us, with {statistics.median(self.over):6.2f} us, "
            f"difference {self.median:5.2f} us (90 of 100 rounds: {low:.2f} to {high:.2f})"
        )


def timed(call: Call) -> float:
    """Microseconds of one call; it has ended when this returns."""
    start = time.thread_time_ns()
    work = call()
    taken = (time.thread_time_ns() - start) / 1e3
    if isinstance(work, torch.Tensor):
        torch.ops._c10d_functional.wait_tensor(work)
    else:
        work.wait()
    return taken


def measure(pair: Pair, options: argparse.Namespace) -> Cost:
    """Time both calls in turns."""
    cost = Cost([], [])
    for number in range(-options.warm_up, options.rounds):
        without, over = [], []
        for turn in range(options.calls):
            if turn % 2:
                without.append(timed(pair.without))
                over.append(timed(pair.over))
            else:
                over.append(timed(pair.over))
                without.append(timed(pair.without))
        if number >= 0:
            cost.without.append(statistics.median(without))
            cost.over.append(statistics.median(over))
    return cost


def run_rank(rank: int, store: str, options: argparse.Namespace) -> bool:
    """One rank; the first prints. Whether the budget is kept."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # newer releases of torch have other names for some collectives
    dist.init_process_group(
        BACKEND_NAME, init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=TIMEOUT
    )
    managed = dist.new_group(timeout=TIMEOUT)
    assert isinstance(managed, ManagedGroup)
    plain = managed.communicator.inner
    assert type(plain) is ProcessGroup
    bare = Bare(plain)  # torch's registry does not keep it
    pairs = {**direct(managed, plain), **functional(managed, plain, bare)}
    gc.disable()  # what it collects belongs to no call
    costs = {name: measure(pair, options) for name, pair in pairs.items()}
    if rank == 0:
        print(f"torch {torch.__version__}, {options.rounds} rounds of {options.calls} calls over each group")
        for name, cost in costs.items():
            print(f"  {name:<23} {cost}")
    dist.barrier()
    return all(costs[name].median <= BUDGET_US for name, pair in pairs.items() if pair.counts)


def main() -> int:
    """Fork the other rank, run both, and say whether the budget is kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=200, help="rounds, each with a turn of either group")
    parser.add_argument("--calls", type=int, default=25, help="calls over each group per round")
    parser.add_argument("--warm-up", type=int, default=10, help="rounds before the first that counts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pitstop-benchmark-") as folder:
        store = str(Path(folder) / "store")
        other = os.fork()  # before any thread exists
        if other == 0:
            os._exit(not run_rank(1, store, options))
        within = run_rank(0, store, options)
        print(f"budget of {BUDGET_US:.0f} us per call: {'kept' if within else 'EXCEEDED'}")
        sys.stdout.flush()
        os.waitpid(other, 0)
    return 0 if within else 1


if __name__ == "__main__":
    raise SystemExit(main())
