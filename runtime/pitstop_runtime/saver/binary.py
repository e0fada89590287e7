"""The library below a saver: one small protocol, and torch_memory_saver behind it.

torch_memory_saver (0.0.10) gives and takes device memory by tag and ends the process when it is used out of order or
finds no memory. ``TorchMemorySaver`` sees to it that this does not happen; what is here only passes calls on and
counts. Only its ``preload`` mode is supported: in its ``torch`` mode the library ends the process when memory of a
region is freed outside of one.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pitstop_runtime.errors import SaverError
from pitstop_runtime.saver.headroom import AllocatorReport, allocator_report
from pitstop_runtime.saver.preload import check_preload, manages_everything


@dataclass(frozen=True, slots=True)
class Usage:
    """What the library manages in this process."""

    device_bytes: int | None
    """Device memory that it pauses, or has paused; None if only the library knows."""
    backup_bytes: int
    """At most this much of it is copied to the host."""
    allocated: int = 0
    """Allocations made so far that it manages, as far as they are seen."""
    freed: int = 0
    """Of these, freed again so far."""


class Binary(Protocol):
    """What ``TorchMemorySaver`` needs of the library; a call returns when it is done, or raises."""

    def pause(self, tag: str) -> None:
        """Give back the memory of one tag, which must be in use."""

    def resume(self, tag: str) -> None:
        """Take the memory of one tag again, which must be paused."""

    def retain(self, keep: bool) -> None:
        """Whether host copies outlive the next resume."""

    def region(self, tag: str, backup: bool) -> AbstractContextManager[None]:
        """Allocations of this thread inside are managed under the tag."""

    def disabled(self) -> AbstractContextManager[None]:
        """Allocations of this thread inside are not managed."""

    def usage(self) -> Usage:
        """What is managed now."""

    def report(self) -> AllocatorReport | None:
        """Free device memory as the driver sees it; None if no device is in use."""

    def synchronize(self) -> None:
        """Wait for the device."""


class LibraryBinary:
    """torch_memory_saver as installed and preloaded in this process, on its current device.

    Sizes come from torch's caching allocator. With ``TMS_INIT_ENABLE=1`` everything it reserves is managed. Without,
    only regions are: then what a pause frees is not known beforehand, and what it copies only at most.

    Raises:
        SaverError: the library is missing, too old, or not set up (see ``preload``).
    """

    def __init__(self) -> None:
        try:
            self._torch = importlib.import_module("torch")
            self._library: Any = importlib.import_module("torch_memory_saver").torch_memory_saver
        except ImportError as error:
            raise SaverError(
                f"torch_memory_saver cannot be imported ({error}): pip install 'pitstop[trainer]'."
            ) from error
        if not hasattr(type(self._library), "retain_cpu_backup"):
            raise SaverError(
                "this torch_memory_saver cannot retain host copies, and 0.0.9 has returned damaged weights: "
                "pip install 'torch_memory_saver>=0.0.10'."
            )
        hook = check_preload(cuda=self._torch.version.cuda)
        self._choose_preloaded(hook)
        self._all = manages_everything()
        try:
            self._library.retain_cpu_backup = False  # the first access sets the library up
        except (AssertionError, RuntimeError, OSError) as error:
            raise SaverError(f"torch_memory_saver cannot be set up: {error}") from error
        # Preloaded, hence among the process's own symbols; the Python package has no public name for it.
        self._is_managing = ctypes.CDLL(None).tms_get_interesting_region
        self._is_managing.restype = ctypes.c_bool
        self._outside = (0, 0)
        self._lock = threading.Lock()

    def _choose_preloaded(self, hook: Path) -> None:
        """Make the library drive the hook that is preloaded.

        Importing megatron-core 0.19 (``core.inference``) sets the mode "torch" for the whole process. The library
        would then open a second binary: regions and pauses would act on that one, allocations on the first.
        """
        library = self._library
        if getattr(library, "_impl", None) is None:
            library.hook_mode = "preload"
            return
        binary = getattr(library._impl, "_binary_wrapper", None)
        opened = str(getattr(getattr(binary, "cdll", None), "_name", hook))
        if Path(opened).name != hook.name:
            raise SaverError(
                f"torch_memory_saver drives {opened}, but {hook} is preloaded: another part of the trainer has set "
                'torch_memory_saver.hook_mode. Make the TorchMemorySaver before that part uses it, or set "preload".'
            )

    def pause(self, tag: str) -> None:
        """Pass on."""
        self._library.pause(tag)

    def resume(self, tag: str) -> None:
        """Pass on."""
        self._library.resume(tag)

    def retain(self, keep: bool) -> None:
        """Pass on."""
        self._library.retain_cpu_backup = keep

    def region(self, tag: str, backup: bool) -> AbstractContextManager[None]:
        """Pass on; allocations come from a pool of the tag's own."""
        region: AbstractContextManager[None] = self._library.region(tag=tag, enable_cpu_backup=backup)
        return region

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Allocations come from a new pool, which is given back once nothing in it is used any more."""
        if not self._is_managing():
            # The library insists on being active here; this thread's allocations are outside already.
            yield
            return
        before = self._segments()
        try:
            with self._library.disable():
                yield
        finally:
            after = self._segments()
            with self._lock:
                taken, given = self._outside
                self._outside = (taken + after[0] - before[0], given + after[1] - before[1])

    def usage(self) -> Usage:
        """Figures of torch's caching allocator."""
        if not self._torch.cuda.is_initialized():
            return Usage(0, 0)
        reserved = int(self._torch.cuda.memory_reserved())
        allocated, freed = self._segments()
        return Usage(
            device_bytes=reserved if self._all else None,
            backup_bytes=reserved,
            allocated=allocated - self._outside[0] if self._all else 0,
            freed=freed - self._outside[1] if self._all else 0,
        )

    def report(self) -> AllocatorReport | None:
        """Figures of the driver and of torch's caching allocator."""
        return allocator_report() if self._torch.cuda.is_initialized() else None

    def synchronize(self) -> None:
        """Wait for all streams: the library waits for none, and unmaps memory that a kernel may be writing."""
        if self._torch.cuda.is_initialized():
            self._torch.cuda.synchronize()

    def _segments(self) -> tuple[int, int]:
        """How many segments the caching allocator has taken from the driver so far, and given back."""
        if not self._torch.cuda.is_initialized():
            return 0, 0
        stats = self._torch.cuda.memory_stats()
        return int(stats.get("segment.all.allocated", 0)), int(stats.get("segment.all.freed", 0))
