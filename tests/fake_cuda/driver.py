"""The loaded stand-in driver: its counters, and the failures that a test can switch on."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from fake_cuda.build import build

_RESULTS = {
    "fake_cuda_used": ctypes.c_uint64,
    "fake_cuda_pinned": ctypes.c_uint64,
    "fake_cuda_host_calls": ctypes.c_uint64,
    "fake_cuda_granularity": ctypes.c_uint64,
    "fake_cuda_set_total": None,
    "fake_cuda_fail_host": None,
    "fake_cuda_damage_upload": None,
}


class Driver:
    """Loads the libraries into this process, for it alone: load after a fork, or use nothing of it before.

    Args:
        total_bytes: device memory; None leaves the default of 1 GiB, or FAKE_CUDA_TOTAL_BYTES.
    """

    def __init__(self, total_bytes: int | None = None) -> None:
        self.folder: Path = build()
        # Global, so that the saver's binary finds both by name; the second refers to the first.
        self._cuda: Any = ctypes.CDLL(str(self.folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
        self._runtime: Any = ctypes.CDLL(str(self.folder / "libcudart.so.12"), mode=ctypes.RTLD_GLOBAL)
        for name, result in _RESULTS.items():
            getattr(self._cuda, name).restype = result
        for name in ("fake_cuda_set_total", "fake_cuda_fail_host"):
            getattr(self._cuda, name).argtypes = [ctypes.c_uint64]
        self.granularity = int(self._cuda.fake_cuda_granularity())
        if total_bytes is not None:
            self.set_total(total_bytes)

    def used(self) -> int:
        """Device bytes in use now, whole pages."""
        return int(self._cuda.fake_cuda_used())

    def pinned(self) -> int:
        """Host bytes that ``cudaMallocHost`` gave and that were not freed."""
        return int(self._cuda.fake_cuda_pinned())

    def host_calls(self) -> int:
        """How often ``cudaMallocHost`` succeeded so far."""
        return int(self._cuda.fake_cuda_host_calls())

    def memory(self) -> tuple[int, int]:
        """Free and total device bytes, as ``cudaMemGetInfo`` gives them."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        status = self._runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
        if status:
            raise RuntimeError(f"cudaMemGetInfo gave {status}: the driver was used before a fork")
        return free.value, total.value

    def set_total(self, total_bytes: int) -> None:
        """Change the size of the device: less than is used leaves nothing free."""
        self._cuda.fake_cuda_set_total(total_bytes)

    def fail_host_allocation(self, nth: int = 1) -> None:
        """Let the n-th ``cudaMallocHost`` from now on fail, once."""
        self._cuda.fake_cuda_fail_host(nth)

    def damage_upload(self) -> None:
        """Let the next copy from host to device change one bit on the way, once."""
        self._cuda.fake_cuda_damage_upload()
