"""Is there enough device memory for the next owner? Figures of the driver, with the caching allocator's share.

What torch calls free is not: its caching allocator keeps freed memory for itself, so NCCL and the rollout engine
run out of memory beside an allocator full of cache. The driver says what is free for anyone; torch says how much of
the rest is cache. Both are named, in the report and in the error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pitstop_runtime.errors import HandOverError
from pitstop_runtime.saver.sizes import show_bytes


@dataclass(frozen=True, slots=True)
class AllocatorReport:
    """Who holds the memory of one device; ``str()`` gives the sentence for a log or an error."""

    device: str
    driver_free_bytes: int
    driver_total_bytes: int
    reserved_bytes: int
    """What torch's caching allocator took from the driver, paused memory included."""
    allocated_bytes: int
    """The part of ``reserved_bytes`` that tensors use."""
    paused_bytes: int | None = 0
    """The part of ``reserved_bytes`` that a saver has given back for now; None: some, but not known how much."""

    @property
    def cached_bytes(self) -> int:
        """What the caching allocator holds without using it: free for torch, for nobody else."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def elsewhere_bytes(self) -> int:
        """What is held outside this process's allocator: other processes, communicators, CUDA contexts."""
        resident = max(0, self.reserved_bytes - (self.paused_bytes or 0))
        return max(0, self.driver_total_bytes - self.driver_free_bytes - resident)

    def __str__(self) -> str:
        size = "an unknown part" if self.paused_bytes is None else show_bytes(self.paused_bytes)
        paused = "" if self.paused_bytes == 0 else f", {size} of it paused"
        return (
            f"device {self.device}: the driver has {show_bytes(self.driver_free_bytes)} free of "
            f"{show_bytes(self.driver_total_bytes)}; torch's caching allocator reserves "
            f"{show_bytes(self.reserved_bytes)}{paused} ({show_bytes(self.allocated_bytes)} in tensors, "
            f"{show_bytes(self.cached_bytes)} cached); other processes, communicators and contexts hold "
            f"{show_bytes(self.elsewhere_bytes)}"
        )


Reporter = Callable[[int | None], AllocatorReport]


def allocator_report(device: int | None = None) -> AllocatorReport:
    """Ask the driver and torch about one device, by default the current one; takes some microseconds."""
    import torch  # noqa: PLC0415 - the module is read without torch as well

    index = torch.cuda.current_device() if device is None else device
    free, total = torch.cuda.mem_get_info(index)
    return AllocatorReport(
        device=str(index),
        driver_free_bytes=int(free),
        driver_total_bytes=int(total),
        reserved_bytes=int(torch.cuda.memory_reserved(index)),
        allocated_bytes=int(torch.cuda.memory_allocated(index)),
    )


def check_headroom(
    needed_bytes: int,
    device: int | None = None,
    *,
    paused_bytes: int | None = 0,
    report: Reporter = allocator_report,
) -> AllocatorReport:
    """Make sure that the driver has ``needed_bytes`` free, and return the figures that say so.

    A measurement, not a reservation: call it after the hand-over's barrier, when no other process takes memory.

    Args:
        needed_bytes: what the next owner takes.
        device: index of the device, the current one by default.
        paused_bytes: what of torch's reserved memory is paused by a saver now; None if that is not known.
        report: where the figures come from.

    Raises:
        HandOverError: there is less; the message names what is needed, what the driver has free, and the caching
            allocator's share.
    """
    figures = replace(report(device), paused_bytes=paused_bytes)
    missing = needed_bytes - figures.driver_free_bytes
    if missing > 0:
        raise HandOverError(
            f"{show_bytes(needed_bytes)} of device memory are needed and {show_bytes(missing)} are missing: "
            f"{figures}. {_remedy(figures, missing)}"
        )
    return figures


def _remedy(figures: AllocatorReport, missing: int) -> str:
    # Cached memory that is paused is not on the device: emptying the cache would free nothing.
    if figures.paused_bytes == 0 and figures.cached_bytes >= missing:
        return "The cache alone would do: call torch.cuda.empty_cache() before the hand-over."
    return (
        "Wait until the other owner of this device has released its memory (a barrier, then this check), or give "
        "it less: the engine's mem_fraction_static, the plan's channel caps."
    )
