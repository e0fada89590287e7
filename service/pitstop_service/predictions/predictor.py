"""The simulator as the service sees it, and how many predictions it may compute at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from pitstop.plan import Plan
from pitstop.prediction import Prediction
from pitstop.scenario import Scenario
from pitstop_service.web.problems import Unavailable


class Predictor(Protocol):
    """Anything that predicts; tests put their own in its place."""

    def __call__(
        self,
        scenario: Scenario,
        *,
        plans: Sequence[Plan] | None,
        evidence: bytes | None,
        budget_bytes: int | None,
        seed: int,
        draws: int,
    ) -> Prediction:
        """Predict; raises InvalidInputError or UnsupportedScenarioError."""


def simulate(
    scenario: Scenario,
    *,
    plans: Sequence[Plan] | None,
    evidence: bytes | None,
    budget_bytes: int | None,
    seed: int,
    draws: int,
) -> Prediction:
    """Predict with the simulator and its bundled calibration."""
    # Imported late: numpy, scipy and simpy take longer to load than the rest of the service.
    from pitstop_simulator.predict import predict  # noqa: PLC0415
    from pitstop_simulator.site import parse_site_evidence  # noqa: PLC0415

    site = None if evidence is None else parse_site_evidence(evidence, "evidence_csv")
    return predict(scenario, plans=plans, site=site, budget_bytes=budget_bytes, seed=seed, draws=draws)


class PredictionSlots:
    """Bounds the predictions that run and those that wait, so that they never take every thread of the server."""

    def __init__(self, workers: int, queue: int) -> None:
        self._running = threading.BoundedSemaphore(workers)
        self._lock = threading.Lock()
        self._free = workers + queue

    @property
    def free_places(self) -> int:
        """How many more predictions would be admitted."""
        return self._free

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Wait for a free worker.

        Raises:
            Unavailable: too many are waiting already (503).
        """
        with self._lock:
            if self._free == 0:
                raise Unavailable("Too many predictions are waiting. Send the request again.")
            self._free -= 1
        try:
            with self._running:
                yield
        finally:
            with self._lock:
                self._free += 1
