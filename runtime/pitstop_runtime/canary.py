"""Does a communicator that lived through the pause still work? One small all-reduce on each says so.

Each rank adds one, its number and a square of it, so that a sum is right only if every member's message
arrived once and unchanged. The canary has a time limit of its own: the group's may be half an hour.

A canary that passes says that this communicator worked this time. The same collective, run on a communicator that
was just rebuilt, makes NCCL build its connections while memory is free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pitstop_runtime.errors import CanaryError, first_line
from pitstop_runtime.groups import Communicator, Library

_POLL_S = 0.0002
_LONGEST_POLL_S = 0.02
_LOOK_S = 0.5
_SIZE = 4


class Canary:
    """Buffers for the canary, made once while memory is there (inside ``saver.disabled()``).

    ``timeout_s`` is the time limit in seconds; ``is_vain`` is asked from time to time whether there is anything left to
    wait for.
    """

    def __init__(self, timeout_s: float, is_vain: Callable[[], bool] = lambda: False) -> None:
        self.timeout_s = timeout_s
        self._is_vain = is_vain
        self._buffers: dict[str, torch.Tensor] = {}

    def prepare(self, communicators: Sequence[Communicator]) -> None:
        """Make a buffer for each communicator that has none."""
        names = {communicator.name for communicator in communicators}
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in names}
        for each in communicators:
            if each.name not in self._buffers:
                device = "cuda" if each.library is Library.NCCL else "cpu"
                self._buffers[each.name] = torch.zeros(_SIZE, dtype=torch.float64, device=device)

    def run(self, communicators: Sequence[Communicator]) -> None:
        """Check communicators, all at the same time; all members have to call it with the same ones.

        Raises:
            CanaryError: the first one that gave a wrong sum, an error, or nothing in time.
        """
        started = time.monotonic()
        works = [(each, self._start(each)) for each in communicators]
        for each, work in works:
            self._wait(each, work, started + self.timeout_s)
        for each, _ in works:
            self._check(each)

    def _start(self, communicator: Communicator) -> Any:
        buffer = self._buffers[communicator.name]
        buffer.copy_(torch.tensor(_pattern(communicator.rank), dtype=torch.float64))
        try:
            return communicator.inner.allreduce([buffer])
        except RuntimeError as error:
            raise _failed(communicator, error) from error

    def _wait(self, communicator: Communicator, work: Any, deadline: float) -> None:
        pause_s, look = _POLL_S, time.monotonic() + _LOOK_S
        while not work.is_completed():
            now = time.monotonic()
            if now > deadline:
                raise CanaryError(f"{communicator}: no answer within {self.timeout_s:g} s")
            if now > look:
                if self._is_vain():
                    raise CanaryError(f"{communicator}: no answer, and another rank has found one missing")
                look = now + _LOOK_S
            time.sleep(pause_s)
            pause_s = min(
                1.1 * pause_s, _LONGEST_POLL_S
            )  # a tenth of what was waited: late by no more than that
        try:
            work.wait()
        except RuntimeError as error:
            raise _failed(communicator, error) from error

    def _check(self, communicator: Communicator) -> None:
        size = len(communicator.ranks)
        expected = [sum(column) for column in zip(*map(_pattern, range(size)), strict=True)]
        found = self._buffers[communicator.name].tolist()
        if found != expected:
            raise CanaryError(f"{communicator}: sums {found} instead of {expected}")


def _pattern(rank: int) -> list[float]:
    return [1.0, rank + 1.0, (rank + 1.0) ** 2, float(rank % 2)]


def _failed(communicator: Communicator, error: Exception) -> CanaryError:
    return CanaryError(f"{communicator}: {first_line(error)}")
