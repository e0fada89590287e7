"""Errors of the runtime. Each says what happened, on which rank and communicator, and what to do."""

from __future__ import annotations

from pitstop.errors import PitstopError

_SHOWN_CHARS = 200


def first_line(error: BaseException) -> str:
    """The start of an error's text for a message of ours, or its kind if it says nothing."""
    lines = str(error).splitlines()
    return lines[0][:_SHOWN_CHARS] if lines else type(error).__name__


class SwitchError(PitstopError, RuntimeError):
    """Base of what can go wrong in a switch; a ``RuntimeError`` too, as trainers expect of torch."""

    title = "Switch failed"


class GroupReleasedError(SwitchError):
    """A collective was called on a group whose communicator is released or suspended."""

    title = "Process group is not live"


class ForbiddenTransitionError(SwitchError):
    """The trainer called an entry point that the state does not allow."""

    title = "Call not allowed now"


class GatesClosedError(SwitchError):
    """The plan may not be carried out here; each closed gate is named."""

    title = "Plan not allowed here"


class UnsupportedDispositionError(SwitchError):
    """A communicator cannot be suspended, or not rebuilt, with this library or these options."""

    title = "Disposition not supported"


class SaverError(SwitchError):
    """The memory saver was used out of order or is not set up for what was asked."""

    title = "Memory saver"


class CorruptedMemoryError(SaverError):
    """A parameter differs before and after the pause."""

    title = "Memory changed while it was paused"


class CanaryError(SwitchError):
    """A kept communicator gave a wrong sum, an error, or nothing within its time limit."""

    title = "Canary failed"


class RankFailedError(SwitchError):
    """Another rank failed, dissented, stalled or died; the message names it if that can be known."""

    title = "Another rank failed"


class HandOverError(SwitchError):
    """The GPU does not have the free memory that the next owner was promised."""

    title = "Not enough device memory"
