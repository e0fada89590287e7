"""Our ``TorchMemorySaver`` over torch_memory_saver's real binary, over the stand-in driver.

    saver = stand_in_saver()
    with saver.region("weights", backup=True):
        weights = torch.randn(1000, 1000)
    saver.pause()  # the memory is gone, touching the tensor is a segmentation fault
    saver.resume()  # the same content at the same address

The binary is the one that production preloads, loaded by hand: its ``cudaMalloc`` is called where torch's caching
allocator would call it, by ``placement``.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import files
from pathlib import Path
from typing import Any

import torch
from torch_memory_saver.binary_wrapper import BinaryWrapper

from fake_cuda.driver import Driver
from fake_cuda.placement import Placement
from pitstop.units import GIB
from pitstop_runtime.saver import AllocatorReport, TorchMemorySaver, Usage

TAGS = ("weights", "gradients", "optimizer", "default")


@dataclass(frozen=True)
class _Block:
    device_bytes: int
    backup_bytes: int


class StandInBinary:
    """A ``pitstop_runtime.saver.Binary``: the real library's C functions, sizes by its own book.

    ``Driver`` is at ``driver``. A process has one binary, for the library keeps its state per process.
    """

    def __init__(self, total_bytes: int | None = None) -> None:
        self.driver = Driver(total_bytes)
        self._library: Any = BinaryWrapper(str(preload_library())).cdll
        self._library.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
        self._library.cudaFree.argtypes = [ctypes.c_void_p]
        self._library.tms_set_retain_cpu_backup(False)
        self._configure("default", False, False)
        self._blocks: dict[int, _Block] = {}
        self._allocated = self._freed = 0

    def pause(self, tag: str) -> None:
        """The real ``tms_pause``."""
        _check("tms_pause", self._library.tms_pause(tag.encode()))

    def resume(self, tag: str) -> None:
        """The real ``tms_resume``."""
        _check("tms_resume", self._library.tms_resume(tag.encode()))

    def retain(self, keep: bool) -> None:
        """The real ``tms_set_retain_cpu_backup``."""
        self._library.tms_set_retain_cpu_backup(keep)

    @contextmanager
    def region(self, tag: str, backup: bool) -> Iterator[None]:
        """Set the library's region of this thread, and put torch's new CPU tensors there."""
        outer = (
            self._library.tms_get_current_tag().decode(),
            self._library.tms_get_interesting_region(),
            self._library.tms_get_enable_cpu_backup(),
        )
        self._configure(tag, True, backup)
        try:
            with Placement(self.allocate, self.is_managing):
                yield
        finally:
            self._configure(*outer)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """New tensors are ordinary ones, inside a region too."""
        managing = self.is_managing()
        self._library.tms_set_interesting_region(False)
        try:
            yield
        finally:
            self._library.tms_set_interesting_region(managing)

    def usage(self) -> Usage:
        """Exact, unlike what can be known of a real device."""
        blocks = list(self._blocks.values())
        return Usage(
            device_bytes=sum(block.device_bytes for block in blocks),
            backup_bytes=sum(block.backup_bytes for block in blocks),
            allocated=self._allocated,
            freed=self._freed,
        )

    def report(self) -> AllocatorReport | None:
        """The driver's figures; there is no caching allocator, so nothing is cached."""
        free, total = self.driver.memory()
        managed = sum(block.device_bytes for block in self._blocks.values())
        return AllocatorReport("stand-in", free, total, managed, managed)

    def synchronize(self) -> None:
        """A CPU has finished."""

    def is_managing(self) -> bool:
        """Whether this thread is in a region."""
        return bool(self._library.tms_get_interesting_region())

    def allocate(self, size: int) -> Any:
        """A buffer of managed memory under this thread's tag; it goes back when the buffer is collected."""
        pointer = ctypes.c_void_p()
        if self._library.cudaMalloc(ctypes.byref(pointer), size):
            raise torch.OutOfMemoryError(f"stand-in device: no memory for {size} bytes")
        address, unit = pointer.value or 0, self.driver.granularity
        backup = size if self._library.tms_get_enable_cpu_backup() else 0
        self._blocks[address] = _Block(-(-size // unit) * unit, backup)
        self._allocated += 1
        buffer = (ctypes.c_byte * size).from_address(address)
        weakref.finalize(buffer, self._free, address).atexit = False
        return buffer

    def _free(self, address: int) -> None:
        del self._blocks[address]
        self._freed += 1
        self._library.cudaFree(address)

    def _configure(self, tag: str, managing: bool, backup: bool) -> None:
        self._library.tms_set_current_tag(tag.encode())
        self._library.tms_set_interesting_region(managing)
        self._library.tms_set_enable_cpu_backup(backup)


def stand_in_saver(
    *,
    total_bytes: int | None = None,
    host_budget_bytes: int = GIB,
    tags: Sequence[str] = TAGS,
    binary: StandInBinary | None = None,
) -> TorchMemorySaver:
    """Our saver over a new binary, or over the given one. Call it after the process has forked.

    Pass ``binary=StandInBinary()`` to have the driver's counters and failures at hand, as ``binary.driver``.
    """
    return TorchMemorySaver(
        host_budget_bytes=host_budget_bytes,
        tags=tags,
        binary=StandInBinary(total_bytes) if binary is None else binary,
    )


def preload_library() -> Path:
    """The hook of the installed torch_memory_saver that production preloads."""
    name = "torch_memory_saver_hook_mode_preload_cu12."
    return next(
        Path(file.locate()) for file in files("torch_memory_saver") or () if file.name.startswith(name)
    )


def _check(what: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{what} gave {status}")
