"""Phases of a switch and the components that make them up: the words that logs, laws and pages share."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """The three parts of a switch, in the order in which they happen."""

    SLEEP = "sleep"
    UPDATE_WEIGHTS = "update_weights"
    WAKE_UP = "wake_up"


class Component(StrEnum):
    """Parts of a phase; each has a cost law of its own."""

    CLEAR_MEMORY = "clear_memory"
    GROUP_RELEASE = "group.release"
    COOLDOWN = "cooldown"
    SAVER_PAUSE = "saver.pause"
    CANARY = "canary"
    GROUP_RESTORE = "group.restore"
    FIRST_COLLECTIVE = "first_collective"
    WEIGHTS_GATHER = "weights.gather"
    WEIGHTS_TRANSFER = "weights.transfer"
    ENGINE_LOAD = "engine.load"
    SAVER_RESUME = "saver.resume"


COMPONENT_TEXT: dict[Component, str] = {
    Component.CLEAR_MEMORY: "garbage collection and emptying the allocator's cache",
    Component.GROUP_RELEASE: "destroying or suspending communicators",
    Component.COOLDOWN: "waiting for ports after a destroy",
    Component.SAVER_PAUSE: "copying the trainer's memory to the host, pinned-memory allocation included",
    Component.CANARY: "checking kept communicators",
    Component.GROUP_RESTORE: "rebuilding or resuming process groups",
    Component.FIRST_COLLECTIVE: "creating communicators at their first collective",
    Component.WEIGHTS_GATHER: "gathering weight shards into whole tensors",
    Component.WEIGHTS_TRANSFER: "handing tensors to the engine's process",
    Component.ENGINE_LOAD: "the engine loading the weights",
    Component.SAVER_RESUME: "copying the trainer's memory back from the host",
}
