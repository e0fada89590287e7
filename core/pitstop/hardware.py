"""GPU models that a scenario may name: facts from vendors' data sheets, never timings.

Memory sizes are what the driver reports or the data sheet states. Link classes decide which measured rows are
comparable; no rate from a data sheet enters a prediction (rates come from evidence).
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from pitstop.units import GIB


class Link(StrEnum):
    """How two GPUs of one node reach each other."""

    NVSWITCH = "nvswitch"
    NVLINK_BRIDGE = "nvlink-bridge"
    PCIE = "pcie"
    XGMI = "xgmi"


class GpuModel(NamedTuple):
    """One GPU model: memory in bytes, the usual link inside a node, compute capability."""

    name: str
    memory_bytes: int
    link: Link
    architecture: str


def _gpu(name: str, memory_gib: float, link: Link, architecture: str) -> tuple[str, GpuModel]:
    return name, GpuModel(name, int(memory_gib * GIB), link, architecture)


GPUS: dict[str, GpuModel] = dict(
    (
        _gpu(
            "h200", 140.4, Link.NVSWITCH, "sm_90"
        ),  # 143,771 MiB by the driver on the machines of the evidence
        _gpu("h100", 80, Link.NVSWITCH, "sm_90"),
        _gpu("h800", 80, Link.NVSWITCH, "sm_90"),
        _gpu("h20", 95.6, Link.NVSWITCH, "sm_90"),  # 97,871 MiB in the report
        _gpu("a100-80g", 80, Link.NVSWITCH, "sm_80"),
        _gpu("a100-40g", 40, Link.NVSWITCH, "sm_80"),
        _gpu("a800", 80, Link.NVSWITCH, "sm_80"),
        _gpu("b200", 179, Link.NVSWITCH, "sm_100"),
        _gpu("b300", 268, Link.NVSWITCH, "sm_103"),
        _gpu("gb200", 185, Link.NVSWITCH, "sm_100"),
        _gpu("rtx-a6000", 48, Link.NVLINK_BRIDGE, "sm_86"),
        _gpu("l20", 48, Link.PCIE, "sm_89"),
        _gpu("l20z", 80, Link.NVSWITCH, "sm_90"),  # 80 GB by the report that names it
        _gpu("l40s", 48, Link.PCIE, "sm_89"),
        _gpu("rtx-4090", 24, Link.PCIE, "sm_89"),
        _gpu("v100", 32, Link.NVSWITCH, "sm_70"),
        _gpu("mi300x", 192, Link.XGMI, "gfx942"),
    )
)
