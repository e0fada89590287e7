"""Device memory as the driver, NVML, torch's allocator and NCCL see it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from pitstop_runtime.groups import Communicator


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes at one moment; None where it cannot be known.

    Attributes:
        device: used on the GPU by all processes (driver).
        process: used on the GPU by this process (NVML).
        allocator: reserved by torch's caching allocator in this process. Paused memory counts: torch does not
            know that it is away.
        communicators: held by this process's communicators, if NCCL can tell (2.29.7 or newer).
    """

    device: int | None = None
    process: int | None = None
    allocator: int | None = None
    communicators: int | None = None


def sample(communicators: Iterable[Communicator]) -> MemorySample:
    """Take a sample now; costs a few driver calls."""
    if not torch.cuda.is_available():
        return MemorySample()
    free, total = torch.cuda.mem_get_info()
    held = [each.memory_bytes() for each in communicators]
    return MemorySample(
        device=total - free,
        process=_process_bytes(),
        allocator=torch.cuda.memory_reserved(),
        communicators=None if None in held else sum(each or 0 for each in held),
    )


def _process_bytes() -> int | None:
    nvml = _nvml()
    if nvml is None:
        return None
    library, device = nvml
    try:
        for process in library.nvmlDeviceGetComputeRunningProcesses(device):
            if process.pid == os.getpid():
                return process.usedGpuMemory
    except library.NVMLError:
        return None
    return None  # in a container, NVML may know the process by another number


@cache
def _nvml() -> tuple[Any, Any] | None:
    try:
        import pynvml  # noqa: PLC0415 - optional

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:  # a missing library or driver is not the trainer's problem
        return None
