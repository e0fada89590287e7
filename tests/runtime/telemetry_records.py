"""Documents that the telemetry tests send."""

from __future__ import annotations

from pitstop.components import Component, Phase
from pitstop.loading import validate
from pitstop.plan import BASELINE
from pitstop.scenario import Scenario
from pitstop.telemetry import MemoryRecord, PhaseRecord, Provenance, RunManifest, StepRecord
from pitstop_runtime.telemetry import Backoff, SendOptions

SCENARIO = validate(
    Scenario,
    {
        "name": "h200x2-tp2",
        "hardware": {"gpu": "h200", "gpus_per_node": 2},
        "layout": {"tp": 2},
        "model": "qwen3-0.6b",
        "engine": {"name": "none"},
    },
    "scenario",
)
IMPATIENT = SendOptions(backoff=Backoff(first_s=0.005, longest_s=0.02), every_s=0.0, refused_pause_s=0.01)


def manifest(name: str = "run") -> RunManifest:
    return RunManifest(scenario=SCENARIO, plan=BASELINE, provenance=Provenance(who=name))


def step(number: int, seconds: float = 8.0) -> StepRecord:
    return StepRecord(
        step=number,
        phases={Phase.SLEEP: PhaseRecord(total_s=seconds, components_s={Component.SAVER_PAUSE: 3.5})},
        memory=MemoryRecord(held_at_sync_bytes=1_047_527_424),
    )
