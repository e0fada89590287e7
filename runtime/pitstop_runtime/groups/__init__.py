"""Managed process groups: importing this registers the backend ``pitstop`` with torch.

    import pitstop_runtime.groups
    torch.distributed.init_process_group("pitstop")

is all that a trainer changes. Groups made from then on are stable handles over communicators that a
``SwitchManager`` can destroy, rebuild, suspend and share. Not carried over: ``monitored_barrier``, which torch
allows for the backend name ``gloo`` only.
"""

from pitstop_runtime.groups.communicator import Communicator, CommunicatorState, Library
from pitstop_runtime.groups.copies import PeerCopies
from pitstop_runtime.groups.handle import BACKEND_NAME, ManagedGroup
from pitstop_runtime.groups.registry import Registry, Wiring, register, registry, release

register()

__all__ = [
    "BACKEND_NAME",
    "Communicator",
    "CommunicatorState",
    "Library",
    "ManagedGroup",
    "PeerCopies",
    "Registry",
    "Wiring",
    "registry",
    "release",
]
