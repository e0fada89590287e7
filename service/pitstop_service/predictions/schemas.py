"""Requests and answers about predictions."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import Field

from pitstop.plan import NAMED_PLANS
from pitstop.prediction import Prediction
from pitstop.scenario import Scenario, StrictModel

PlanName = Annotated[str, Field(json_schema_extra={"enum": list(NAMED_PLANS)})]

_SCENARIO: dict[str, Any] = {
    "schema_version": 1,
    "name": "h200x2-tp2",
    "hardware": {"gpu": "h200", "gpus_per_node": 2},
    "layout": {"tp": 2},
    "model": "qwen3-0.6b",
    "trainer": {
        "group_creation": "eager",
        "rollout_s": 10,
        "saved_bytes_per_rank": 8_589_934_592,
        "export_bytes_per_rank": 4_294_967_296,
    },
    "engine": {"name": "none"},
    "versions": {"torch": "2.11.0+cu130", "nccl": "2.30.7", "megatron": "0.19.2"},
}
_SITE_SCENARIO: dict[str, Any] = {
    "name": "relax-4xa6000-qwen3-4b",
    "hardware": {"gpu": "rtx-a6000", "gpus_per_node": 4, "link": "nvlink-bridge"},
    "layout": {"tp": 2, "dp": 2},
    "model": "qwen3-4b",
    "trainer": {"group_creation": "lazy", "cooldown_s": 2.0, "rollout_s": 500, "step_s": 992},
    "engine": {"name": "sglang", "tp": 4, "mem_fraction_static": 0.65},
}

PREDICTION_EXAMPLES: dict[str, Any] = {
    "every named plan": {
        "summary": "Predict every named plan on two H200, within 2 GiB held while the trainer is paused",
        "value": {"scenario": _SCENARIO, "budget_bytes": 2_147_483_648},
    },
    "with a baseline log": {
        "summary": "What would keep-window give, from one's own baseline log?",
        "value": {
            "scenario": _SITE_SCENARIO,
            "plans": ["reload", "keep-window"],
            "evidence_csv": "sleep_s,update_weights_s,wake_up_s\n5.42,3.80,2.28\n5.11,4.10,2.19\n5.36,4.20,2.17\n",
            "seed": 1,
            "draws": 100,
        },
    },
}


class PredictionRequest(StrictModel):
    """What to predict. The same request gives the same numbers, here and on the command line."""

    scenario: Scenario = Field(description="hardware, layout, model, engine and versions to predict for")
    plans: Annotated[list[PlanName], Field(min_length=1, max_length=50)] | None = Field(
        default=None,
        description="named plans to predict; all if absent. `reload` is always added, as gains refer to it",
    )
    evidence_csv: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="text of your own baseline log: CSV with the columns sleep_s, update_weights_s, wake_up_s (seconds "
        "of the slowest rank, a row per step; optional: warmup, step_time_s, held_at_sync_bytes)",
    )
    budget_bytes: Annotated[int, Field(ge=1, le=2**50)] | None = Field(
        default=None,
        description="most device bytes per GPU that the trainer may hold at weight sync and in the rollout",
    )
    seed: Annotated[int, Field(ge=0, le=2**53)] = Field(default=0, description="seed of all random numbers")
    draws: Annotated[int, Field(ge=50, le=2000)] = Field(default=200, description="Monte Carlo draws")


class PredictionOut(StrictModel):
    """A stored prediction."""

    id: str = Field(description="identifier (UUID)")
    created_at: datetime = Field(description="when it was made, UTC")
    prediction: Prediction = Field(
        description="seconds and bytes per plan with intervals, and a recommendation"
    )
