"""Requests and answers about runs."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import Field

from pitstop.components import Phase
from pitstop.scenario import StrictModel
from pitstop.telemetry import RunManifest, StepRecord
from pitstop_service.predictions.schemas import PREDICTION_EXAMPLES

MAX_BATCH = 10_000

RUN_EXAMPLES: dict[str, Any] = {
    "baseline run": {
        "summary": "A run of the baseline plan on two H200",
        "value": {
            "schema_version": 1,
            "scenario": PREDICTION_EXAMPLES["every named plan"]["value"]["scenario"],
            "plan": {"schema_version": 1, "name": "reload", "training": "destroy", "cooldown": "fixed"},
            "provenance": {"who": "infrastructure team", "host": "node-17", "commit": "1f33585"},
            "warmup_steps": 1,
            "started_at": "2026-01-15T08:30:00Z",
        },
    }
}
STEP_EXAMPLES: dict[str, Any] = {
    "two steps": {
        "summary": "Two steps, the second with its components",
        "value": {
            "steps": [
                {
                    "step": 0,
                    "phases": {
                        "sleep": {"total_s": 9.8},
                        "update_weights": {"total_s": 5.1},
                        "wake_up": {"total_s": 4.2},
                    },
                },
                {
                    "step": 1,
                    "phases": {
                        "sleep": {"total_s": 8.1, "components_s": {"saver.pause": 3.6, "cooldown": 2.0}},
                        "update_weights": {"total_s": 4.9},
                        "wake_up": {"total_s": 3.9},
                    },
                    "step_s": 61.5,
                    "memory": {"held_at_sync_bytes": 1_047_527_424},
                    "recorded_at": "2026-01-15T08:33:10Z",
                },
            ]
        },
    }
}


class RunCreated(StrictModel):
    """A run that now takes steps."""

    id: str = Field(description="identifier (UUID)")
    created_at: datetime = Field(description="when it was registered, UTC")


class PhaseSummary(StrictModel):
    """One phase over the steady steps of a run."""

    n: int = Field(description="steady steps that measured this phase")
    mean_s: float | None = Field(description="mean seconds; null without a step")
    sd_s: float | None = Field(
        description="standard deviation between steps of this run, in seconds; null below two steps"
    )


class RunSummary(StrictModel):
    """Steps after the warm-up. The spread is within this run; it says nothing about other runs."""

    steady_steps: int = Field(description="stored steps without the leading warm-up steps")
    phases: dict[Phase, PhaseSummary] = Field(description="per phase")


class RunOut(StrictModel):
    """A run with its summary."""

    id: str = Field(description="identifier (UUID)")
    created_at: datetime = Field(description="when it was registered, UTC")
    manifest: RunManifest = Field(description="what stays the same over the run")
    step_count: int = Field(description="stored steps, warm-up included")
    summary: RunSummary = Field(description="seconds per phase over the steady steps")


class StepBatch(StrictModel):
    """Steps to store together: all of them or none."""

    steps: Annotated[list[StepRecord], Field(min_length=1, max_length=MAX_BATCH)] = Field(
        description="measured steps in any order; a step may be sent again unchanged"
    )


class StepBatchOut(StrictModel):
    """What became of a batch."""

    stored: int = Field(description="steps that were new")
    duplicates: int = Field(
        description="steps that had been stored before, or twice in the batch, with equal content"
    )


class StepPage(StrictModel):
    """Steps in the order of their numbers."""

    steps: list[StepRecord] = Field(description="steps as they were sent")
    next_after: int | None = Field(description="pass as `after` for the next page; null on the last page")
