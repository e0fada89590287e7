"""An action beside the caller, in a thread of its own and with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from pitstop_runtime.errors import SwitchError

T = TypeVar("T")
_LOOK_S = 0.5
_NAME = "pitstop-background"


def is_beside() -> bool:
    """Whether the caller runs in a thread of ``Background``."""
    return threading.current_thread().name == _NAME


def on_current_device(action: Callable[[], T]) -> Callable[[], T]:
    """The action, to be called in another thread, on the CUDA device of this one: threads begin on the first."""
    if not torch.cuda.is_available():
        return action
    device = torch.cuda.current_device()

    def on_device() -> T:
        torch.cuda.set_device(device)
        return action()

    return on_device


class Background:
    """Runs at once; ``join`` waits and raises what the action raised.

    ``describe`` is asked at a time-out for what the action is busy with; ``is_vain`` from time to time, whether there
    is anything left to wait for. A thread cannot be ended from outside: after a time-out it is left behind, and the
    process should not go on for long.
    """

    def __init__(
        self,
        action: Callable[[], None],
        timeout_s: float,
        describe: Callable[[], str],
        is_vain: Callable[[], bool] = lambda: False,
    ) -> None:
        self._action, self._timeout_s, self._describe = on_current_device(action), timeout_s, describe
        self._is_vain = is_vain
        self._error: BaseException | None = None
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end.

        Raises:
            SwitchError: the time limit passed, or waiting is in vain.
        """
        deadline = self._started + self._timeout_s
        while self._thread.is_alive() and (left_s := deadline - time.monotonic()) > 0:
            self._thread.join(min(left_s, _LOOK_S))
            if self._thread.is_alive() and self._is_vain():
                raise SwitchError(f"{self._describe()} was given up: another rank has found one missing")
        if self._thread.is_alive():
            raise SwitchError(f"{self._describe()} did not end within {self._timeout_s:g} s")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:  # raised again by join
            self._error = error
