"""Gates on memory: what the driver has free on the device, and what the host can give."""

from __future__ import annotations

from typing import Final

from pitstop.gates.facts import Facts
from pitstop.gates.gate import Finding, Gate, any_plan, found_closed, found_open, not_known, retains
from pitstop.units import gib


def _headroom(facts: Facts) -> Finding:
    return _compare(
        facts.needed_bytes,
        facts.driver_free_bytes,
        "device memory",
        "Let the engine hold less (mem_fraction_static), empty torch's cache, or use a plan that needs less.",
    )


def _host_memory(facts: Facts) -> Finding:
    return _compare(
        facts.host_backup_bytes,
        facts.host_available_bytes,
        "host memory per node",
        "Free host memory, or use a plan with backup: reallocate.",
    )


def _compare(needed: int | None, free: int | None, what: str, remedy: str) -> Finding:
    if needed is None and free is None:
        return not_known()
    wants = "unknown" if needed is None else f"{gib(needed):,.2f} GiB"
    has = "unknown" if free is None else f"{gib(free):,.2f} GiB"
    seen = f"{what}: needed {wants}, free {has}"
    if needed is None or free is None:
        return not_known(seen)
    return found_open(seen) if needed <= free else found_closed(seen, remedy)


MEMORY_GATES: Final = (
    Gate(
        "headroom",
        "the driver has the device memory free that the plan needs",
        "NCCL allocates past torch, from what the driver has free. Torch's figure counts memory that its own cache "
        "holds, and a rebuild or a first collective then fails or stalls.",
        "THUDM/slime#669, THUDM/slime#956, THUDM/slime#1086, modelscope/ms-swift#9486",
        any_plan,
        _headroom,
        required=False,  # what a plan needs is not always known before its first switch
    ),
    Gate(
        "host-memory",
        "the host has the memory that retained backups take",
        "Retained backups stay pinned through the rollout, so that the kernel cannot take them back; it ends "
        "processes instead.",
        "arithmetic of the scenario; evidence/sources/h200x2_memory_saver.csv for what retaining gains",
        retains,
        _host_memory,
    ),
)
