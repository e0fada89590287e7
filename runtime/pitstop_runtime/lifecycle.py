"""What a trainer may call when: a state machine over every entry point.

A checkpoint that is saved while the groups are released, or a second ``sleep``, must be a clear error and not a
hang or a crash ten steps later. So each entry point is announced here; one that the state forbids raises and
says what to call instead. No torch in here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

from pitstop_runtime.errors import ForbiddenTransitionError, SwitchError


class State(StrEnum):
    """Where the trainer is in the cycle."""

    ACTIVE = "active"
    PAUSED_LIVE = "paused-live"
    PAUSED_SUSPENDED = "paused-suspended"
    PAUSED_RELEASED = "paused-released"
    FAILED = "failed"
    CLOSED = "closed"

    @property
    def is_paused(self) -> bool:
        """Whether the trainer's memory is away."""
        return self in _PAUSED


class Entry(StrEnum):
    """Entry points of a trainer."""

    TRAIN = "train"
    SAVE = "save"
    EVAL = "eval"
    SLEEP = "sleep"
    UPDATE_WEIGHTS = "update_weights"
    WAKE_UP = "wake_up"
    SHUTDOWN = "shutdown"


_PAUSED = frozenset({State.PAUSED_LIVE, State.PAUSED_SUSPENDED, State.PAUSED_RELEASED})
_WORK = (Entry.TRAIN, Entry.SAVE, Entry.EVAL)

# From each state: entry points allowed, and the states that they may end in.
TRANSITIONS: Mapping[State, Mapping[Entry, frozenset[State]]] = {
    State.ACTIVE: {
        **dict.fromkeys(_WORK, frozenset({State.ACTIVE})),
        Entry.SLEEP: _PAUSED,
        Entry.UPDATE_WEIGHTS: frozenset({State.ACTIVE}),
        Entry.SHUTDOWN: frozenset({State.CLOSED}),
    },
    **{
        paused: {
            Entry.UPDATE_WEIGHTS: _PAUSED,
            Entry.WAKE_UP: frozenset({State.ACTIVE}),
            Entry.SHUTDOWN: frozenset({State.CLOSED}),
        }
        for paused in _PAUSED
    },
    State.FAILED: {Entry.SHUTDOWN: frozenset({State.CLOSED})},
    State.CLOSED: {Entry.SHUTDOWN: frozenset({State.CLOSED})},
}

# For each refusal but those of FAILED.
_REMEDIES: Mapping[tuple[State, Entry], str] = {
    (State.ACTIVE, Entry.WAKE_UP): "There is nothing to wake: call sleep() first.",
    **{(paused, entry): "Call wake_up() first." for paused in _PAUSED for entry in _WORK},
    **{
        (paused, Entry.SLEEP): "It sleeps already: call wake_up() before the next sleep()."
        for paused in _PAUSED
    },
    **{
        (State.CLOSED, entry): "The manager was shut down: make a new one."
        for entry in Entry
        if entry is not Entry.SHUTDOWN
    },
}


class Lifecycle:
    """The state of one trainer process. Entry points may not overlap, neither nested nor from two threads."""

    def __init__(self) -> None:
        self.state = State.ACTIVE
        self.failure: str | None = None
        self._running: Entry | None = None
        self._lock = threading.Lock()

    @contextmanager
    def entry(self, entry: Entry) -> Iterator[None]:
        """Hold an entry point while the body runs; the body moves the state on with ``become``.

        Raises:
            ForbiddenTransitionError: the state does not allow it, or another entry point is under way.
        """
        with self._lock:
            if self._running is not None:
                raise ForbiddenTransitionError(
                    f"{entry}() was called while {self._running}() is under way. Call one after the other."
                )
            if entry not in TRANSITIONS[self.state]:
                raise ForbiddenTransitionError(f"{entry}() is not allowed now: {self._why_not(entry)}")
            self._running = entry
        try:
            yield
        finally:
            self._running = None

    def become(self, state: State) -> None:
        """Enter the state in which the running entry point ends.

        Raises:
            SwitchError: no such transition; a fault of Pitstop's own.
        """
        running = self._running
        if running is None or state not in TRANSITIONS[self.state].get(running, frozenset()):
            raise SwitchError(f"{running} may not lead from {self.state} to {state}")
        self.state = state

    def fail(self, reason: str) -> None:
        """Enter FAILED, from anywhere: only ``shutdown`` is possible then."""
        self.state, self.failure = State.FAILED, self.failure or reason

    def _why_not(self, entry: Entry) -> str:
        if self.state is State.FAILED:
            return (
                f"an earlier switch failed ({self.failure}). Call shutdown(), and restart from a checkpoint."
            )
        memory = " (the trainer's memory is paused)" if self.state.is_paused else ""
        return f"the state is {self.state}{memory}. {_REMEDIES[self.state, entry]}"
