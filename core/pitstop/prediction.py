"""A prediction: per plan the seconds and bytes with intervals, the support verdict, and a recommendation."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field

from pitstop.components import Component, Phase
from pitstop.scenario import Bytes, StrictModel, Versions

PREDICTION_SCHEMA_VERSION: Final = 1


class Interval(StrictModel):
    """Mean and central predictive interval; ``level`` is the interval's probability."""

    mean: float
    lo: float
    hi: float
    level: Annotated[float, Field(gt=0, lt=1)] = 0.9


class Verdict(StrEnum):
    """Whether a scenario lies inside the measured range."""

    INSIDE = "inside"
    EDGE = "edge"
    EXTRAPOLATED = "extrapolated"
    REFUSED = "refused"


class Support(StrictModel):
    """The verdict and why."""

    verdict: Verdict
    reasons: list[str] = Field(default_factory=list)


class CalibrationRef(StrictModel):
    """Which calibration made the numbers, and how many evidence rows it used."""

    id: str
    rows_used: int
    site_rows_used: int = Field(default=0, description="rows of the user's own evidence")
    site_evidence: str | None = Field(default=None, description="digest of the user's own evidence")


class TimelinePoint(StrictModel):
    """Device bytes of the busiest GPU from ``at_s`` (seconds since sleep began) on, by holder."""

    at_s: float
    event: str
    trainer_bytes: int
    communicator_bytes: int
    overhead_bytes: int


class PlanPrediction(StrictModel):
    """What one plan would cost on this scenario."""

    plan: str
    switch_s: Interval
    phases: dict[Phase, Interval]
    components: dict[Component, Interval]
    gain_s: Interval = Field(description="seconds saved per switch against `reload`; negative: slower")
    first_step_s: Interval = Field(
        description="communicator creation that lazy groups push into the next training step; not part of switch_s"
    )
    held_at_sync_bytes: Interval = Field(description="device bytes per GPU the trainer holds at weight sync")
    held_in_rollout_bytes: Interval = Field(
        description="device bytes per GPU the trainer holds during the rollout"
    )
    host_pinned_bytes: Interval = Field(description="pinned host bytes per node held between switches")
    peak_bytes: Interval = Field(description="device bytes per GPU at the trainer's peak during the switch")
    communicators: int = Field(description="live communicators of the busiest rank while training")
    within_budget: bool = True
    condition: str | None = Field(
        default=None, description="what must be shown on the machine before the plan may run"
    )
    support: Support
    notes: list[str] = Field(default_factory=list)
    timeline: list[TimelinePoint] = Field(default_factory=list)


class Recommendation(StrictModel):
    """The planner's choice and its reasons."""

    plan: str
    reasons: list[str]


class Prediction(StrictModel):
    """The answer for one scenario."""

    schema_version: Literal[1] = PREDICTION_SCHEMA_VERSION
    scenario: str
    scenario_digest: str = Field(description="SHA-256 of the scenario's canonical JSON")
    seed: int
    draws: int
    calibration: CalibrationRef
    budget_bytes: Bytes | None = Field(
        default=None, description="limit on held_in_rollout_bytes and held_at_sync_bytes"
    )
    plans: list[PlanPrediction]
    support: Support
    recommended: Recommendation
    dominant: str = Field(description="which component makes up most of the baseline switch, in words")
    versions: dict[str, str] = Field(description="software that made the prediction")
    scenario_versions: Versions = Field(description="software versions the prediction is for")
    version_notes: list[str] = Field(
        default_factory=list, description="where they differ from the evidence's"
    )
