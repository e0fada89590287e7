"""Suspending a communicator and asking for its memory: through torch where it can, else NCCL by ctypes.

``ncclCommSuspend``, ``ncclCommResume`` and ``ncclCommMemStats`` exist from NCCL 2.29.7 on; torch has methods
of the backend for them from 2.12 on. Constants: ``nccl.h`` of NCCL 2.30.7.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from pitstop_runtime.errors import UnsupportedDispositionError

_SUSPEND_MEMORY = 0x01
_STAT_TOTAL_BYTES = 3
FIRST_WITH_SUSPEND = (2, 29, 7)


@cache
def _library() -> ctypes.CDLL | None:
    """The NCCL in this process, if it has the functions; the one that torch uses, preloaded or not."""
    library = ctypes.CDLL(None)
    for handle in (library, *_opened("libnccl.so.2")):
        if hasattr(handle, "ncclCommSuspend"):
            handle.ncclCommSuspend.argtypes = [ctypes.c_void_p, ctypes.c_int]
            handle.ncclCommResume.argtypes = [ctypes.c_void_p]
            handle.ncclCommMemStats.argtypes = [
                ctypes.c_void_p,
                ctypes.c_int,
                ctypes.POINTER(ctypes.c_uint64),
            ]
            return handle
    return None


def _opened(name: str) -> tuple[ctypes.CDLL, ...]:
    """The library if it is loaded already: a second copy of NCCL would know nothing of our communicators."""
    try:
        return (ctypes.CDLL(name, mode=getattr(ctypes, "RTLD_NOLOAD", 0x4) | ctypes.RTLD_LOCAL),)
    except OSError:
        return ()


def runtime_version() -> tuple[int, ...] | None:
    """Version of the NCCL in use, or None without one."""
    if not torch.cuda.is_available():
        return None
    version = ctypes.c_int()
    for handle in (ctypes.CDLL(None), *_opened("libnccl.so.2")):
        if hasattr(handle, "ncclGetVersion") and handle.ncclGetVersion(ctypes.byref(version)) == 0:
            code = version.value
            return (code // 10_000, code // 100 % 100, code % 100)
    return tuple(torch.cuda.nccl.version())


def suspend(backend: Any, what: str) -> None:
    """Give the device memory of a communicator back; it cannot be used until ``resume``.

    Raises:
        UnsupportedDispositionError: neither torch nor NCCL can do it.
    """
    if not _by_torch(backend, "suspend"):
        library = _require(what)
        _check(library.ncclCommSuspend(_communicator(backend), _SUSPEND_MEMORY), "ncclCommSuspend", what)


def resume(backend: Any, what: str) -> None:
    """Take the memory again and make the communicator usable."""
    if not _by_torch(backend, "resume"):
        _check(_require(what).ncclCommResume(_communicator(backend)), "ncclCommResume", what)


def memory_bytes(backend: Any) -> int | None:
    """Device bytes that a communicator holds, or None if NCCL cannot say."""
    library = _library()
    if library is None:
        return None
    value = ctypes.c_uint64()
    pointer = _communicator(backend)
    if not pointer or library.ncclCommMemStats(pointer, _STAT_TOTAL_BYTES, ctypes.byref(value)) != 0:
        return None
    return value.value


def _by_torch(backend: Any, method: str) -> bool:
    """Whether torch did it. Its method exists in builds too whose NCCL was too old when torch was built."""
    if not hasattr(backend, method):
        return False
    try:
        getattr(backend, method)()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _communicator(backend: Any) -> int:
    return int(backend._comm_ptr())


def _require(what: str) -> ctypes.CDLL:
    library = _library()
    if library is None:
        needed = ".".join(map(str, FIRST_WITH_SUSPEND))
        found = ".".join(map(str, runtime_version() or ())) or "no NCCL"
        raise UnsupportedDispositionError(
            f"{what} cannot be suspended: NCCL {needed} or newer is needed, found {found}. "
            "Preload a newer libnccl.so.2, or use a plan that destroys or keeps the communicators."
        )
    return library


def _check(result: int, function: str, what: str) -> None:
    if result != 0:
        raise UnsupportedDispositionError(f"{function} of {what} failed with ncclResult {result}")
