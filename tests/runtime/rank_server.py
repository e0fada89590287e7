"""Run functions of test modules on forked ranks that are in one world of managed gloo groups.

A test process starts one server, which imports torch once. The server forks a tree of ranks for each call, so that
a tree costs a tenth of a second:

    def case_sum() -> float:            # runs on every rank
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    def test_sum() -> None:
        assert on_ranks(case_sum, 3) == [3.0, 3.0, 3.0]

What a rank returns travels as JSON.
"""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

from pitstop.gates import Facts

FACTS = Facts(
    role="actor",
    colocated=True,
    fully_async=False,
    uses_critic=False,
    uses_cuda_graphs=False,
    weights_backed_up=True,
    weight_transfer="ipc",
)
"""What a trainer has to state for every plan to be allowed on CPU."""

_HERE = Path(__file__).resolve().parent
_STORE_S = 20.0
_END_S = 5.0


class RankError(AssertionError):
    """A rank raised, died or did not end in time; the text has the traceback of the first one."""


class _Server:
    def __init__(self) -> None:
        paths = [str(_HERE.parent), str(_HERE), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "rank_server"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def ask(self, job: dict[str, Any]) -> list[Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "the server of ranks has ended"}')
        if "error" in answer:
            raise RankError(answer["error"])
        results: list[Any] = answer["results"]
        return results

    def close(self) -> None:
        self._process.communicate()


_server = cache(_Server)


def on_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 30.0
) -> list[Any]:
    """Call ``function(*arguments)`` on each rank of a world; what each returned, by rank.

    Raises:
        RankError: a rank raised, died or did not end in time.
    """
    return _server().ask(
        {
            "module": function.__module__,
            "function": function.__name__,
            "arguments": arguments,
            "world_size": world_size,
            "timeout_s": timeout_s,
        }
    )


@contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """What the runtime logs inside, on this rank."""
    texts: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pitstop_runtime")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def _on_rank(job: dict[str, Any], rank: int, world_size: int, rendezvous: str) -> Any:
    import torch
    import torch.distributed as dist

    from pitstop_runtime.groups import BACKEND_NAME

    torch.set_num_threads(1)
    dist.init_process_group(
        BACKEND_NAME,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_STORE_S),
    )
    store = dist.distributed_c10d._get_default_store()
    result = getattr(importlib.import_module(job["module"]), job["function"])(*job["arguments"])
    # Who ends first resets its connections, and what another one has not read yet is lost.
    store.set(f"end/{rank}", "")
    with suppress(RuntimeError):
        store.wait([f"end/{other}" for other in range(world_size)], timedelta(seconds=_END_S))
    return result


def _main() -> None:
    from megatron_cpu import launch

    logging.getLogger("pitstop_runtime").addHandler(logging.NullHandler())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a rank prints is no answer
    for line in sys.stdin:
        job = json.loads(line)
        importlib.import_module(job["module"])
        try:
            answer = {
                "results": launch.run_ranks(partial(_on_rank, job), job["world_size"], job["timeout_s"])
            }
        except launch.RankError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _main()
