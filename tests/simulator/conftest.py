"""Scenarios, evidence and calibration that several tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pitstop.loading import load_scenario, validate
from pitstop.scenario import Scenario
from pitstop_simulator.calibration import Calibration, load_calibration
from pitstop_simulator.evidence import Evidence, load_evidence
from pitstop_simulator.site import SiteEvidence, parse_site_evidence

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="session")
def evidence() -> Evidence:
    return load_evidence()


@pytest.fixture(scope="session")
def calibration() -> Calibration:
    return load_calibration()


@pytest.fixture(scope="session")
def h200x2() -> Scenario:
    return load_scenario(EXAMPLES / "h200x2-tp2.yaml")


@pytest.fixture(scope="session")
def a6000() -> Scenario:
    return load_scenario(EXAMPLES / "relax-4xa6000-qwen3-4b.yaml")


@pytest.fixture(scope="session")
def a6000_site() -> SiteEvidence:
    path = EXAMPLES / "relax-4xa6000-qwen3-4b.baseline.csv"
    return parse_site_evidence(path.read_bytes(), path.name)


@pytest.fixture(scope="session")
def make_scenario() -> Any:
    def make(**changes: Any) -> Scenario:
        document = {
            "name": "s",
            "hardware": {"gpu": "h200", "gpus_per_node": 2},
            "layout": {"tp": 2},
            "model": "qwen3-0.6b",
            **changes,
        }
        return validate(Scenario, document, "scenario")

    return make
