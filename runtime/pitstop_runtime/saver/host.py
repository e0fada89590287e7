"""Host memory for the copies of paused device memory: what there is, and what one process may keep.

A retained copy makes a pause twenty times faster and holds pinned memory that nothing else on the node can use,
swap included. So it is kept only within a budget per process.
"""

from __future__ import annotations

from pathlib import Path

from pitstop_runtime.errors import SaverError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Host memory that can be taken now: the kernel's ``MemAvailable``, or what a container leaves, if less.

    Raises:
        SaverError: the kernel does not say (this is not Linux).
    """
    try:
        lines = meminfo.read_text().splitlines()
    except OSError as error:
        raise SaverError(
            f"{meminfo} cannot be read ({error}): give node_available_bytes yourself."
        ) from error
    for line in lines:
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            left = _left_in_container(cgroup)
            return available if left is None else min(available, left)
    raise SaverError(f"{meminfo} has no MemAvailable: give node_available_bytes yourself.")


def host_budget(node_available_bytes: int | None = None, ranks_per_node: int = 1, share: float = 0.5) -> int:
    """What each process of a node may keep pinned: an equal part of a share of the available memory.

    Call it on every rank with the same arguments, before the first backup exists. The engine's own host copies,
    data loaders and the page cache need the other part.

    Args:
        node_available_bytes: what the node has to give; by default, what it has now.
        ranks_per_node: trainer processes on the node.
        share: part of the available memory that all of them together may pin.
    """
    if ranks_per_node < 1 or not 0 < share <= 1:
        raise SaverError(
            f"a host budget needs ranks_per_node >= 1 and 0 < share <= 1, got {ranks_per_node} and {share}."
        )
    available = available_host_bytes() if node_available_bytes is None else node_available_bytes
    return int(available * share) // ranks_per_node


def _left_in_container(cgroup: Path) -> int | None:
    """What the control group (version 2) leaves, file cache counted as free; None without a limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
