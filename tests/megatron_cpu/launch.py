"""Run one function on several ranks: import torch and Megatron once, then fork.

No thread exists before the fork, so that forking is safe; it saves each rank the seconds that the imports
take.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

RankFunction = Callable[[int, int, str], Any]
_POLL_S = 0.01
_GRACE_S = 1.0


class RankError(RuntimeError):
    """A rank failed or took too long; the message has the traceback of the first one."""


def run_ranks(
    function: RankFunction, world_size: int, timeout_s: float = 60.0, lost: Collection[int] = ()
) -> list[Any]:
    """Call ``function(rank, world_size, rendezvous file)`` in one forked process per rank.

    Ranks in ``lost`` are meant to die or to hang: they may, and are ended when the others have ended.

    Returns:
        What each rank returned (JSON-able), by rank; None for a lost one.

    Raises:
        RankError: a rank raised, died or did not end in time; the others are ended too.
    """
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pids = {_fork(function, rank, world_size, folder): rank for rank in range(world_size)}
        failed = _wait(pids, timeout_s, lost)
        errors = sorted(folder.glob("error*"))
        if errors:
            raise RankError(f"{errors[0].name}: {errors[0].read_text()}")
        if failed:
            raise RankError(f"ranks {failed} died or did not end within {timeout_s} s")
        return [
            None if rank in lost else json.loads((folder / f"result{rank}").read_text())
            for rank in range(world_size)
        ]


def _fork(function: RankFunction, rank: int, world_size: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        result = function(rank, world_size, str(folder / "rendezvous"))
        (folder / f"result{rank}").write_text(json.dumps(result))
        status = 0
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
    finally:
        # Not sys.exit: nothing of the parent's interpreter state may be torn down twice.
        os._exit(status)


def _wait(pids: dict[int, int], timeout_s: float, lost: Collection[int]) -> list[int]:
    """Wait for all ranks, give the others a moment once one has failed, and return the ranks that failed."""
    failed, deadline = [], time.monotonic() + timeout_s
    while not set(pids.values()) <= set(lost):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            rank = pids.pop(pid)
            if os.waitstatus_to_exitcode(status) and rank not in lost:
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        elif time.monotonic() > deadline:
            failed.extend(set(pids.values()) - set(lost))
            break
        else:
            time.sleep(_POLL_S)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return failed
