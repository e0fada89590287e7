"""Pausing the trainer's device memory, with checks that it comes back whole. Importing this needs no torch."""

from pitstop_runtime.saver.binary import Binary, LibraryBinary, Usage
from pitstop_runtime.saver.checksum import ParameterCheck
from pitstop_runtime.saver.headroom import AllocatorReport, allocator_report, check_headroom
from pitstop_runtime.saver.host import available_host_bytes, host_budget
from pitstop_runtime.saver.interface import NullSaver, Saver
from pitstop_runtime.saver.recomputed import Recomputed
from pitstop_runtime.saver.torch_saver import TorchMemorySaver

__all__ = [
    "AllocatorReport",
    "Binary",
    "LibraryBinary",
    "NullSaver",
    "ParameterCheck",
    "Recomputed",
    "Saver",
    "TorchMemorySaver",
    "Usage",
    "allocator_report",
    "available_host_bytes",
    "check_headroom",
    "host_budget",
]
