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
    """One phase of one step: seconds of the slowest rank, and its components where they were measured."""

    total_s: StepSeconds
    components_s: dict[Component, StepSeconds] = Field(default_factory=dict)


class MemoryRecord(StrictModel):
    """Device bytes per GPU at the moments that matter; null where not measured."""

    held_at_sync_bytes: Bytes | None = None
    held_in_rollout_bytes: Bytes | None = None
    host_pinned_bytes: Bytes | None = None


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
    slowest_rank: Annotated[int, Field(ge=0)] | None = None
    recorded_at: AwareDatetime | None = None

    @property
    def switch_s(self) -> float:
        """Seconds of the whole switch."""
        return sum(record.total_s for record in self.phases.values())
