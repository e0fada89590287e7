"""Is the memory there that the next owner of the GPU was promised? Measured, after a barrier, on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pitstop_runtime.control import Control
from pitstop_runtime.errors import HandOverError
from pitstop_runtime.saver import Saver, check_headroom


class HandOver:
    """Checks both ways. ``check`` is replaced in tests: there is no driver to ask without a GPU."""

    def __init__(
        self,
        control: Control,
        saver: Saver,
        check: Callable[..., object] | None = None,
    ) -> None:
        self._control = control
        self._saver = saver
        self._check = check or (check_headroom if torch.cuda.is_available() else None)

    def to_engine(self, needed_bytes: int | None) -> None:
        """The trainer is out: is what the engine needs free?

        Raises:
            HandOverError: it is not, here or on another rank's GPU.
        """
        self._require(needed_bytes, "the memory promised to the engine is not free on another rank's GPU")

    def to_trainer(self) -> None:
        """The engine should be out: is there room for what was paused?

        Raises:
            HandOverError: there is not, here or on another rank's GPU.
        """
        self._require(
            self._saver.saved_bytes() if self._saver.paused else None,
            "another rank's GPU has no room to wake up: the engine still holds memory there",
        )

    def _require(self, needed_bytes: int | None, elsewhere: str) -> None:
        if self._check is None:
            return
        error: HandOverError | None = None
        if needed_bytes:
            try:
                self._check(needed_bytes, paused_bytes=self._saver.saved_bytes() if self._saver.paused else 0)
            except HandOverError as missing:
                error = missing
        if self._control.any(error is not None, "device memory"):
            raise error or HandOverError(elsewhere)
