"""Notes that ranks leave for one another in the rendezvous store, on a connection that is never waited for too long.

Torch's own connection serves one call at a time: while a rank waits there for a member of a communicator, nobody else
gets a word in. And a store whose host has frozen neither answers nor refuses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from pitstop_runtime.errors import SwitchError

T = TypeVar("T")
_SILENT = "the rendezvous store does not answer: rank 0, which hosts it, may be frozen or overloaded"


class SilentStoreError(SwitchError):
    """The rendezvous store neither answers nor refuses."""

    title = "Store does not answer"


class Board:
    """The calls of a store that Pitstop needs, each answered within ``limit_s``.

    Raises:
        SilentStoreError: no answer in time; as long as that call is open, all others end so at once.
        RuntimeError: whatever torch raises if the store is gone.
    """

    def __init__(self, prefix: str, limit_s: float) -> None:
        self._store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store().clone())
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._silent = False

    def set(self, key: str, text: str) -> None:
        """Write; returns at once, for a store does not answer to that."""
        self._own(self._limit_s)
        try:
            self._store.set(key, text)
        finally:
            self._lock.release()

    def check(self, *keys: str) -> bool:
        """Whether something is written at all of them."""
        return self._ask(lambda: self._store.check(list(keys)))

    def get(self, key: str, wait_s: float = 0.0) -> str:
        """What is written there, waiting for it if need be."""

        def read() -> str:
            # As long as the caller waits: what is written there may yet take a moment to come.
            self._store.wait([key], timedelta(seconds=self._limit_s + wait_s))
            return str(self._store.get(key).decode())

        return self._ask(read, wait_s)

    def add(self, key: str, number: int) -> int:
        """Add to a number; returns the sum."""
        return self._ask(lambda: int(self._store.add(key, number)))

    def set_first(self, key: str, text: str) -> None:
        """Write, unless something is written there."""
        self._ask(lambda: self._store.compare_set(key, "", text))

    def _ask(self, question: Callable[[], T], wait_s: float = 0.0) -> T:
        """Ask in a thread, for a call that gets no answer cannot be ended."""
        answers: list[T] = []
        errors: list[RuntimeError] = []

        def run() -> None:
            try:
                answers.append(question())
            except RuntimeError as error:
                errors.append(error)
            finally:
                self._lock.release()

        self._own(self._limit_s + wait_s)
        thread = threading.Thread(target=run, name="pitstop-board", daemon=True)
        thread.start()
        thread.join(self._limit_s + wait_s)
        if errors:
            raise errors[0]
        self._silent = not answers
        if self._silent:
            raise SilentStoreError(_SILENT)
        return answers[0]

    def _own(self, limit_s: float) -> None:
        if not self._lock.acquire(timeout=0 if self._silent else limit_s):
            raise SilentStoreError(_SILENT)
