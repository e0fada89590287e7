"""What a switch asks of a memory saver, and the saver for trainers that keep their memory.

A saver takes a process's device memory away while the rollout engine owns the GPU and gives it back at the same
addresses. ``pause`` and ``resume`` alternate; a second call of either is a ``SaverError``, never a no-op, for
it means that two parts of a trainer disagree about who owns the memory.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from pitstop.plan import Backup
from pitstop_runtime.errors import SaverError


class Saver(Protocol):
    """Pauses and resumes the device memory of this process."""

    @property
    def name(self) -> str:
        """What records and messages call it."""

    @property
    def paused(self) -> bool:
        """Whether any memory is paused now. Touching paused memory is a fault of the device."""

    def pause(self) -> None:
        """Give the device memory back, content copied to the host where its region asks for it."""

    def resume(self) -> None:
        """Take the device memory again, at the same addresses, and restore what was copied."""

    def disabled(self) -> AbstractContextManager[None]:
        """Allocations of this thread inside stay out of the saver: they work while paused and are not paused.

        For canary and gather buffers. Another thread that allocates needs a ``disabled()`` of its own.
        """

    def region(self, tag: str, backup: bool) -> AbstractContextManager[None]:
        """Allocations of this thread inside carry the tag; with ``backup``, their content survives a pause."""

    def set_backup(self, rule: Backup) -> None:
        """Choose whether the host copies are kept between switches; a saver may have to fall back."""

    def saved_bytes(self) -> int | None:
        """Device bytes that a pause gives back (while paused: gave back); None if that is not known."""

    def pinned_bytes(self) -> int | None:
        """Host bytes that the copies hold now; None if that is not known."""


class NullSaver:
    """Pauses nothing. Keeps the rules of order all the same, so that a mistake shows with any saver."""

    name = "none"

    def __init__(self) -> None:
        self._paused = False
        self._lock = threading.Lock()

    @property
    def paused(self) -> bool:
        """Whether ``pause`` was called last."""
        return self._paused

    def pause(self) -> None:
        """Note that memory counts as paused."""
        with self._lock:
            if self._paused:
                raise SaverError(already_paused("memory"))
            self._paused = True

    def resume(self) -> None:
        """Note that memory is in use again."""
        with self._lock:
            if not self._paused:
                raise SaverError(not_paused())
            self._paused = False

    def disabled(self) -> AbstractContextManager[None]:
        """Nothing to switch off."""
        return nullcontext()

    def region(self, tag: str, backup: bool) -> AbstractContextManager[None]:  # noqa: ARG002 - the interface's
        """Nothing to tag."""
        return nullcontext()

    def set_backup(self, rule: Backup) -> None:
        """No backups, so no rule."""

    def saved_bytes(self) -> int | None:
        """Nothing is given back."""
        return 0

    def pinned_bytes(self) -> int | None:
        """Nothing is copied."""
        return 0


def already_paused(what: str) -> str:
    """The text of a second pause."""
    return (
        f"pause was called, but {what} is paused already. Call resume first: each sleep is followed by one "
        "wake-up, and only one part of the trainer may drive the saver."
    )


def not_paused() -> str:
    """The text of a resume without a pause."""
    return (
        "resume was called, but nothing is paused. Call pause first: each wake-up follows one sleep, and only "
        "one part of the trainer may drive the saver."
    )
