"""torch_memory_saver, driven so that it never ends the process.

The library calls ``exit`` on a second pause or resume of a tag, on an allocation made under a paused tag, and when
it finds no host or device memory. Here each of these is found before the library is called and becomes an error that
a trainer can act on, with memory as it was. What cannot be found beforehand: someone else driving the library in
this process, memory of a C library that calls ``cudaMalloc`` while paused, and another process taking the device's or
the host's last memory in the instant after it was measured.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from pitstop.plan import Backup
from pitstop_runtime.errors import SaverError
from pitstop_runtime.saver.binary import Binary, LibraryBinary, Usage
from pitstop_runtime.saver.headroom import check_headroom
from pitstop_runtime.saver.host import available_host_bytes
from pitstop_runtime.saver.interface import already_paused, not_paused
from pitstop_runtime.saver.sizes import show_bytes

_log = logging.getLogger(__name__)


class TorchMemorySaver:
    """Pauses all declared tags in their order and resumes them in the reverse one; safe to call from any thread.

    Args:
        host_budget_bytes: host memory that copies of this process may hold between switches (``host_budget``).
        tags: every tag that regions use. ``default`` is what the library calls memory outside of regions.
        binary: the library; by default torch_memory_saver as preloaded in this process.
        host_available: how much host memory can be taken now.
    """

    name = "torch_memory_saver"

    def __init__(
        self,
        *,
        host_budget_bytes: int,
        tags: Sequence[str] = ("default",),
        binary: Binary | None = None,
        host_available: Callable[[], int] = available_host_bytes,
    ) -> None:
        if not tags or "" in tags or len(set(tags)) != len(tags):
            # To the library, an empty tag means all of them.
            raise SaverError(f"tags must be distinct and not empty, got {tuple(tags)}.")
        self.tags = tuple(tags)
        self._budget = host_budget_bytes
        self._host_available = host_available
        self._binary: Binary = LibraryBinary() if binary is None else binary
        self._lock = threading.RLock()
        self._paused_tags: list[str] = []
        self._open_regions = 0
        self._wanted = Backup.REALLOCATE
        self._note: str | None = None
        self._at_pause = Usage(0, 0)
        self._pinned = 0

    @property
    def paused(self) -> bool:
        """Whether any tag is paused now."""
        return bool(self._paused_tags)

    @property
    def backup(self) -> Backup:
        """The rule in force: what was set, or ``REALLOCATE`` where that would exceed the budget."""
        return self._wanted if self._note is None else Backup.REALLOCATE

    @property
    def backup_note(self) -> str | None:
        """Why the rule in force is not the one that was set; None if it is."""
        return self._note

    def set_backup(self, rule: Backup) -> None:
        """Set the rule for the host copies. It is weighed against the budget here and at every pause."""
        with self._lock:
            self._wanted = rule
            self._weigh(self._at_pause if self._paused_tags else self._binary.usage())

    def pause(self) -> None:
        """Wait for the device and pause all tags.

        Raises:
            SaverError: memory is paused already, a region is open, the host has no room for the copies, or the
                library failed. In each case memory is in use as before; content of regions without backup is
                lost in the last one.
        """
        with self._lock:
            if self._paused_tags:
                raise SaverError(already_paused(self._names(self._paused_tags)))
            if self._open_regions:
                raise SaverError(
                    f"{self._open_regions} region(s) of the saver are open: what they allocate while paused could "
                    "never be resumed. Leave the region before pausing."
                )
            self._binary.synchronize()
            usage = self._binary.usage()
            self._check_host(usage)
            self._weigh(usage)
            if usage.device_bytes == 0:
                _log.warning(
                    "the memory saver manages no memory, so pausing frees none: start with TMS_INIT_ENABLE=1 or "
                    "allocate inside Saver.region"
                )
            for tag in self.tags:
                try:
                    self._binary.pause(tag)
                except Exception as error:
                    self._undo_pause(tag, error)
                self._paused_tags.append(tag)
            self._at_pause, self._pinned = usage, usage.backup_bytes

    def resume(self) -> None:
        """Resume all paused tags and wait for the device.

        Raises:
            SaverError: nothing is paused, memory was allocated under the saver while paused, or the library
                failed. What is still paused then stays so, and ``resume`` may be called again.
            HandOverError: the device has less free memory than is needed; likewise.
        """
        with self._lock:
            if not self._paused_tags:
                raise SaverError(not_paused())
            self._check_strays()
            self._check_device()
            self._binary.retain(self.backup is Backup.RETAIN)
            while self._paused_tags:
                tag = self._paused_tags[-1]
                try:
                    self._binary.resume(tag)
                except Exception as error:
                    raise SaverError(
                        f"resuming {self._names([tag])} failed: {error}. Still paused: "
                        f"{self._names(self._paused_tags)}; call resume again once the cause is gone."
                    ) from error
                self._paused_tags.pop()
            self._binary.synchronize()
            self._pinned = self._at_pause.backup_bytes if self.backup is Backup.RETAIN else 0

    def disabled(self) -> AbstractContextManager[None]:
        """Allocations of this thread inside stay out of the saver, paused or not."""
        return self._binary.disabled()

    @contextmanager
    def region(self, tag: str, backup: bool) -> Iterator[None]:
        """Allocations of this thread inside carry the tag; with ``backup``, their content survives a pause."""
        with self._lock:
            if tag not in self.tags:
                raise SaverError(
                    f"tag {tag!r} was not declared: TorchMemorySaver(tags=(..., {tag!r})). All ranks must know "
                    f"the tags beforehand, to pause them in one order. Declared: {self._names(self.tags)}."
                )
            if self._paused_tags:
                raise SaverError(
                    f"a region of tag {tag!r} was entered while memory is paused: what it allocates could never "
                    "be resumed. Resume first, or allocate inside Saver.disabled()."
                )
            self._open_regions += 1
        try:
            with self._binary.region(tag, backup):
                yield
        finally:
            with self._lock:
                self._open_regions -= 1

    def saved_bytes(self) -> int | None:
        """Device bytes that a pause gives back (while paused: gave back); None if the library alone knows."""
        with self._lock:
            return (self._at_pause if self._paused_tags else self._binary.usage()).device_bytes

    def pinned_bytes(self) -> int | None:
        """Host bytes that the copies hold now: while paused, and between switches if they are retained."""
        return self._pinned

    def _weigh(self, usage: Usage) -> None:
        note = None
        if self._wanted is Backup.RETAIN and usage.backup_bytes > self._budget:
            note = (
                f"host copies of {show_bytes(usage.backup_bytes)} exceed this process's budget of "
                f"{show_bytes(self._budget)}: they are freed at each resume and allocated again at each pause "
                "(reallocate), which makes every pause slower. Give the saver a larger budget, or save less."
            )
        if note and self._note is None:
            _log.warning(note)
        self._note = note

    def _check_host(self, usage: Usage) -> None:
        more = usage.backup_bytes - self._pinned
        available = self._host_available() if more > 0 else 0
        if more > available:
            raise SaverError(
                f"pausing copies {show_bytes(usage.backup_bytes)} to the host, which takes {show_bytes(more)} more "
                f"than is held, but {show_bytes(available)} of host memory are available. Free host memory, call "
                "torch.cuda.empty_cache() first, or register gradient buffers as Recomputed."
            )

    def _check_strays(self) -> None:
        now, then = self._binary.usage(), self._at_pause
        allocated, freed = now.allocated - then.allocated, now.freed - then.freed
        if allocated > freed:
            raise SaverError(
                f"at least {allocated - freed} allocation(s) were made under the saver while its memory was paused; "
                "the library would end the process at resume. Allocate inside Saver.disabled() while paused; to "
                "go on now, drop those tensors, call torch.cuda.empty_cache(), and resume again."
            )

    def _check_device(self) -> None:
        needed, report = self._at_pause.device_bytes, self._binary.report()
        # After a resume that failed half-way, less is needed than was counted at the pause.
        if needed and report and len(self._paused_tags) == len(self.tags):
            check_headroom(needed, paused_bytes=needed, report=lambda _: report)

    def _undo_pause(self, tag: str, error: Exception) -> None:
        """Resume what was paused before the tag that failed, then raise."""
        problem = f"pausing {self._names([tag])} failed: {error}"
        while self._paused_tags:
            try:
                self._binary.resume(self._paused_tags[-1])
            except Exception as second:
                raise SaverError(
                    f"{problem}. Undoing it failed too: {second}. Still paused: "
                    f"{self._names(self._paused_tags)}; call resume once the cause is gone."
                ) from error
            self._paused_tags.pop()
        raise SaverError(f"{problem}. All memory is in use again, as before the pause.") from error

    @staticmethod
    def _names(tags: Sequence[str]) -> str:
        return ("tag " if len(tags) == 1 else "tags ") + ", ".join(tags)
