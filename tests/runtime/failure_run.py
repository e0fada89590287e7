"""Four gloo ranks, one of which fails. Cells in, what the ranks saw out, as JSON.

    PYTHONPATH=tests python tests/runtime/failure_run.py < lists_of_cells.jsonl

Each cell has processes of its own, forked from this one. All run at the same time, but only as many as there are
tokens are doing more than waiting: time limits are short here, and must not be missed for want of CPUs.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import mmap
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rank_server import FACTS  # noqa: E402
from torch.distributed.distributed_c10d import _set_pg_timeout  # noqa: E402

import pitstop_runtime.groups  # noqa: E402
from megatron_cpu.launch import RankError, run_ranks  # noqa: E402
from pitstop.components import Component, Phase  # noqa: E402
from pitstop.gates import TORCH_MEMORY_SAVER  # noqa: E402
from pitstop_runtime import control, executor, facts  # noqa: E402
from pitstop_runtime.enabling import Stage  # noqa: E402
from pitstop_runtime.errors import ForbiddenTransitionError  # noqa: E402
from pitstop_runtime.executor import Limits  # noqa: E402
from pitstop_runtime.groups import Communicator, PeerCopies  # noqa: E402
from pitstop_runtime.lifecycle import State  # noqa: E402
from pitstop_runtime.manager import Settings, SwitchManager  # noqa: E402
from pitstop_runtime.saver import NullSaver  # noqa: E402
from pitstop_runtime.sync import WeightSync  # noqa: E402

# Time limits are short where one rank fails, and long where a slow machine is all that they could find.
HASTY = Limits(timeout_s=3.0, canary_s=1.5, cooldown_s=0.01)
PATIENT = Limits(timeout_s=60.0, canary_s=30.0, cooldown_s=0.01)
GRACE_S = 2.0
# Of the groups: gloo cannot break a collective off, so one whose member does not come ends with this. Copies can, and
# have to: a training job's limit is half an hour.
HASTY_GROUPS_S = 2.0
PATIENT_GROUPS_S = 150.0
PATIENT_PLANS = ("lean-copies",)
STALL_S = 600.0
CELL_S = 120.0
TOKENS = 2
GROUPS = {
    "TENSOR_MODEL_PARALLEL_GROUP": [[0, 1], [2, 3]],
    "MODEL_PARALLEL_GROUP": [[0, 1], [2, 3]],
}


class InjectedError(RuntimeError):
    """What goes wrong on purpose."""


class PretendSaver(NullSaver):
    """Pauses nothing, but passes for the saver that the gates ask for."""

    name = TORCH_MEMORY_SAVER


class Injection:
    """The observer of a rank: fails once, at the point that the cell says, if this rank is the victim.

    With ``how`` = ``watch``, it only keeps what is gone through.
    """

    def __init__(self, cell: dict[str, Any], rank: int, settle: Callable[[], None]) -> None:
        self.how = cell["how"]
        self.point = f"{cell['phase']}/{cell['component']}"
        self.settle = settle
        self.armed = False
        self.seen: list[str] = []
        self.is_victim = rank == cell["victim"]

    def __call__(self, phase: Phase, component: Component) -> None:
        if not self.armed:
            return
        self.seen.append(f"{phase}/{component}")
        if self.how == "watch" or not self.is_victim or self.seen[-1] != self.point:
            return
        self.armed = False
        self.settle()
        if self.how == "raise":
            raise InjectedError("injected")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "stall":
            time.sleep(STALL_S)
        if self.how == "corrupt":
            corrupt_next_all_reduce()


def corrupt_next_all_reduce() -> None:
    """Add a wrong number to this rank's part of the next all-reduce that Pitstop itself starts."""
    honest = {kind: kind.inner for kind in (Communicator, PeerCopies)}

    class Corrupting:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def allreduce(self, tensors: list[torch.Tensor], *rest: Any) -> Any:
            for kind, inner in honest.items():
                kind.inner = inner
            tensors[0] += 1
            return self._inner.allreduce(tensors, *rest)

    for kind, inner in honest.items():
        kind.inner = property(lambda self, inner=inner: Corrupting(inner.fget(self)))


class Heard(logging.Handler):
    """Keeps what Pitstop logs on this rank."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("pitstop_runtime")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


class Trainer:
    """Groups named as Megatron's are, collectives on them with known results, and an export that gathers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.groups: dict[str, tuple[list[int], Any]] = {}
        for description, parts in GROUPS.items():
            for ranks in parts:
                group = dist.new_group(ranks, group_desc=description)
                if rank in ranks:
                    self.groups[description] = ranks, group

    def step(self) -> None:
        """Train."""
        for ranks, group in [*self.groups.values(), (list(range(dist.get_world_size())), dist.group.WORLD)]:
            total = torch.tensor([self.rank + 1.0])
            dist.all_reduce(total, group=group)
            assert total.item() == sum(rank + 1 for rank in ranks), f"{group.group_desc}: {total}"

    def export(self, sync: WeightSync) -> None:
        """Gather the weights."""
        ranks, group = self.groups["TENSOR_MODEL_PARALLEL_GROUP"]
        with sync.gather():
            whole = [torch.empty(8) for _ in ranks]
            dist.all_gather(whole, torch.full((8,), float(self.rank)), group=group)
        assert [shard[0].item() for shard in whole] == ranks


def join(rank: int, world_size: int, rendezvous: str) -> None:
    """Make the default group over a TCP store that rank 0 hosts, as in a real job: it dies with its host."""
    torch.set_num_threads(1)
    port = Path(rendezvous)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        unfinished = port.with_suffix(".new")
        unfinished.write_text(str(store.port))
        unfinished.rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), world_size, wait_for_workers=False)
    dist.init_process_group(
        pitstop_runtime.groups.BACKEND_NAME,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=PATIENT_GROUPS_S),
    )


def play(
    cell: dict[str, Any], settle: Callable[[], None], rank: int, world_size: int, rendezvous: str
) -> Any:
    """One rank's part of a cell: a good switch, the one that fails, and what comes after."""
    heard = Heard()
    join(rank, world_size, rendezvous)
    trainer = Trainer(rank)
    injection = Injection(cell, rank, settle)
    manager = SwitchManager(
        cell["plan"],
        saver=PretendSaver(),
        facts=FACTS,
        settings=Settings(limits=PATIENT),
        observer=injection,
    )
    trainer.step()
    if manager.enabling.stage is Stage.ELIGIBLE:  # the first switch goes the baseline's way
        assert switch(manager, trainer) == []
        trainer.step()
    injection.armed = True
    set_limits(manager, HASTY, PATIENT_GROUPS_S if cell["plan"] in PATIENT_PLANS else HASTY_GROUPS_S)
    started = time.monotonic()
    errors = switch(manager, trainer)
    seconds = time.monotonic() - started
    if injection.how == "watch":
        settle()
    injection.armed = False
    answer = {
        "rank": rank,
        "seconds": seconds,
        "errors": errors,
        "seen": injection.seen,
        "state": manager.state.value,
        "failure": manager.lifecycle.failure,
        "log": heard.lines[:],
    }
    if manager.state is State.ACTIVE:
        trainer.step()
        assert switch(manager, trainer) == []
        trainer.step()
    else:
        try:
            manager.sleep()
        except ForbiddenTransitionError as error:
            answer["refusal"] = str(error)
    enabling = manager.enabling
    answer |= {"stage": enabling.stage.value, "in_force": manager.plan.name, "reason": enabling.reason}
    manager.shutdown()
    return answer


def set_limits(manager: SwitchManager, limits: Limits, groups_s: float) -> None:
    """Take other time limits from now on, as if the manager and the groups had been made with them."""
    registry = pitstop_runtime.groups.registry
    manager._executor._limits = limits
    manager._executor._canary.timeout_s = limits.canary_s
    registry.rendezvous.limit_s = limits.timeout_s + executor._SLACK_S
    manager._control.timeout_s = limits.agreement_s
    _set_pg_timeout(timedelta(seconds=limits.agreement_s), manager._control._group)
    for group in registry.managed():
        group.set_timeout(timedelta(seconds=groups_s))


def switch(manager: SwitchManager, trainer: Trainer) -> list[list[str]]:
    """Go through one switch, each phase again if it failed and may be tried again; the errors on the way."""
    errors = []
    phases = [manager.sleep, lambda: manager.update_weights(trainer.export), manager.wake_up]
    while phases and manager.state is not State.FAILED and len(errors) < 2:
        try:
            phases[0]()
        except Exception as error:
            errors.append([type(error).__name__, str(error)])
            set_limits(manager, PATIENT, PATIENT_GROUPS_S)
        else:
            phases.pop(0)
    return errors


class Turns:
    """Tokens for the cells: one is taken to begin, and given back by the victim as it fails."""

    def __init__(self, cells: int) -> None:
        self._taken, self._given_back = os.pipe()
        os.write(self._given_back, b"." * TOKENS)
        self._settled = mmap.mmap(-1, cells)  # shared with all processes that are forked from here

    def take(self) -> None:
        os.read(self._taken, 1)

    def settle(self, cell: int) -> None:
        if not self.is_settled(cell):
            self._settled[cell] = 1
            os.write(self._given_back, b".")

    def close(self) -> None:
        os.close(self._taken)
        os.close(self._given_back)

    def is_settled(self, cell: int) -> bool:
        return bool(self._settled[cell])


def supervise(cell: dict[str, Any], number: int, turns: Turns) -> Any:
    """Play one cell; what each rank saw, or why there is no answer."""
    try:
        ranks = run_ranks(partial(play, cell, partial(turns.settle, number)), 4, CELL_S, cell["lost"])
    except RankError as error:
        return str(error)
    else:
        return ranks if turns.is_settled(number) else "nothing failed: the point was never reached"
    finally:
        turns.settle(number)


def play_all(cells: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Play each cell in a process of its own, as soon as there is a token for it."""
    turns = Turns(len(cells))
    pids = []
    for number, cell in enumerate(cells):
        turns.take()
        pid = os.fork()
        if pid == 0:
            try:
                (folder / str(number)).write_text(json.dumps(supervise(cell, number, turns)))
            finally:
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    turns.close()
    return [json.loads((folder / str(number)).read_text()) for number in range(len(cells))]


def main() -> None:
    """Answer each list of cells on the standard input with the longest wait in seconds and what the ranks saw."""
    control._GRACE_S = GRACE_S
    facts._version = functools.cache(facts._version)  # ranks need not look into the packages' files again
    for package in ("torch_memory_saver", "megatron-core"):
        facts._version(package)
    gc.freeze()  # a collection in a forked process would write to, and so copy, the pages of all that was imported
    # A component, the agreement that follows, and who is missing there: found by one, read by the others.
    longest_s = HASTY.timeout_s + HASTY.agreement_s + 2 * GRACE_S
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps([longest_s, play_all(json.loads(line), Path(folder))]), flush=True)


if __name__ == "__main__":
    main()
