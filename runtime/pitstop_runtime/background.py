"""An action beside the caller, in a thread of its own and with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from pitstop_runtime.errors import SwitchError


class Background:
    """Runs at once; ``join`` waits and raises what the action raised.

    ``describe`` is asked at a time-out for what the action is busy with. A thread cannot be ended from outside:
    after a time-out it is left behind, and the process should not go on for long.
    """

    def __init__(self, action: Callable[[], None], timeout_s: float, describe: Callable[[], str]) -> None:
        self._action, self._timeout_s, self._describe = action, timeout_s, describe
        self._error: BaseException | None = None
        self._started = time.monotonic()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(target=self._run, name="pitstop-background", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end.

        Raises:
            SwitchError: the time limit passed.
        """
        self._thread.join(max(0.0, self._started + self._timeout_s - time.monotonic()))
        if self._thread.is_alive():
            raise SwitchError(f"{self._describe()} did not end within {self._timeout_s:g} s")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            self._action()
        except BaseException as error:  # raised again by join
            self._error = error
