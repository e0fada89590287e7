"""Telemetry: what a trainer reports of its run and of each step. One schema for files, spool and HTTP."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AwareDatetime, Field

from pitstop.components import Component, Phase
from pitstop.plan import Plan
from pitstop.scenario import Bytes, Scenario, StrictModel

TELEMETRY_SCHEMA_VERSION: Final = 1

StepSeconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]


class Provenance(StrictModel):
    """Who measured, where, with what."""

    who: str = Field(default="", max_length=200, description="person, team or report")
    host: str = Field(default="", max_length=200, description="machine or cluster")
    commit: str = Field(default="", max_length=100, description="commit of the trainer")
    address: str = Field(default="", max_length=500, description="where the record can be read")


class RunManifest(StrictModel):
    """What stays the same over a run."""

    schema_version: Literal[1] = Field(
        default=TELEMETRY_SCHEMA_VERSION, description="version of this record's schema"
    )
    scenario: Scenario
    plan: Plan
    provenance: Provenance = Field(default_factory=Provenance)
    arm: str | None = Field(default=None, max_length=60, description="arm of an A/B experiment")
    pair_id: str | None = Field(
        default=None, max_length=100, description="runs that belong together in an experiment"
    )
    warmup_steps: Annotated[int, Field(ge=0, le=10_000)] = Field(
        default=2, description="leading steps that are not steady and never fitted"
    )
    started_at: AwareDatetime | None = None


class PhaseRecord(StrictModel):
    """One phase of one step: seconds of the slowest rank, and its components where they were measured.

    ``components_s`` is what the phase waited for. What ran beside something else in a thread is in
    ``overlapped_s``, from start to end, and not in the total.
    """

    total_s: StepSeconds = Field(description="seconds of the slowest rank")
    components_s: dict[Component, StepSeconds] = Field(
        default_factory=dict, description="seconds that each component kept the slowest rank waiting"
    )
    overlapped_s: dict[Component, StepSeconds] = Field(
        default_factory=dict, description="seconds of components that ran beside others, on the slowest rank"
    )
    fastest_s: dict[Component, StepSeconds] = Field(
        default_factory=dict, description="seconds of each component on the fastest rank"
    )
    slowest_ranks: dict[Component, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict, description="rank that was slowest, per component"
    )


class MemoryRecord(StrictModel):
    """Device bytes at the moments that matter, of the rank or GPU that holds most; null where not measured."""

    held_at_sync_bytes: Bytes | None = Field(
        default=None, description="per GPU, held by all processes at the weight sync (driver)"
    )
    held_in_rollout_bytes: Bytes | None = Field(
        default=None, description="per GPU, held by all processes when the rollout begins (driver)"
    )
    process_at_sync_bytes: Bytes | None = Field(
        default=None, description="held by one trainer process at the weight sync (NVML)"
    )
    allocator_at_sync_bytes: Bytes | None = Field(
        default=None, description="of which torch's caching allocator reserves, paused memory included"
    )
    communicators_bytes: Bytes | None = Field(
        default=None, description="held by one process's communicators at the weight sync"
    )
    host_pinned_bytes: Bytes | None = Field(
        default=None, description="pinned host memory of one process's backups"
    )


class ProcessCounts(StrictModel):
    """What leaks if groups are not torn down well; of the rank that has most, after the switch."""

    communicators: Annotated[int, Field(ge=0)] = Field(description="live communicators")
    sockets: Annotated[int, Field(ge=0)] = Field(description="open sockets of the process")
    threads: Annotated[int, Field(ge=0)] = Field(description="threads of the process")


class StepRecord(StrictModel):
    """One switch as measured."""

    schema_version: Literal[1] = Field(
        default=TELEMETRY_SCHEMA_VERSION, description="version of this record's schema"
    )
    step: Annotated[int, Field(ge=0, le=2**53)] = Field(
        description="training step number, unique within the run"
    )
    phases: dict[Phase, PhaseRecord] = Field(min_length=1)
    step_s: StepSeconds | None = Field(default=None, description="the whole step")
    memory: MemoryRecord = Field(default_factory=MemoryRecord)
    slowest_rank: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="rank whose whole switch took longest"
    )
    plan: str | None = Field(
        default=None, max_length=60, description="plan carried out in this step, if not the manifest's"
    )
    fallback: str | None = Field(
        default=None, max_length=2000, description="why the baseline was carried out instead of the plan"
    )
    counts: ProcessCounts | None = Field(default=None, description="live communicators, sockets, threads")
    recorded_at: AwareDatetime | None = Field(default=None, description="when the switch had ended")

    @property
    def switch_s(self) -> float:
        """Seconds of the whole switch."""
        return sum(record.total_s for record in self.phases.values())
