"""Make predictions and keep them."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import UTC, datetime

from pitstop.errors import FieldProblem, InvalidPlanError, show_value
from pitstop.plan import Plan, named_plan
from pitstop.prediction import Prediction
from pitstop_service.web.problems import NotFound

from .models import StoredPrediction
from .predictor import PredictionSlots, Predictor
from .repository import PredictionRepository
from .schemas import PredictionOut, PredictionRequest


class PredictionService:
    """What the endpoints do, without HTTP and without commit."""

    def __init__(
        self, repository: PredictionRepository, predictor: Predictor, slots: PredictionSlots
    ) -> None:
        self._repository = repository
        self._predictor = predictor
        self._slots = slots

    def create(self, request: PredictionRequest) -> PredictionOut:
        """Predict and store. The transaction begins only with the storing, after the long computation.

        Raises:
            InvalidInputError: a plan or the evidence cannot be used.
            UnsupportedScenarioError: the evidence does not reach as far as the scenario.
        """
        plans = None if request.plans is None else _plans(request.plans)
        with self._slots.slot():
            prediction = self._predictor(
                request.scenario,
                plans=plans,
                evidence=None if request.evidence_csv is None else request.evidence_csv.encode(),
                budget_bytes=request.budget_bytes,
                seed=request.seed,
                draws=request.draws,
            )
        stored = StoredPrediction(
            id=str(uuid.uuid4()),
            created_at=datetime.now(UTC),
            scenario_name=prediction.scenario,
            scenario_digest=prediction.scenario_digest,
            calibration_id=prediction.calibration.id,
            recommended=prediction.recommended.plan,
            budget_bytes=request.budget_bytes,
            request=request.model_dump(mode="json"),
            result=prediction.model_dump(mode="json"),
        )
        self._repository.add(stored)
        return PredictionOut(id=stored.id, created_at=stored.created_at, prediction=prediction)

    def get(self, identifier: str) -> PredictionOut:
        """Look a prediction up.

        Raises:
            NotFound: there is none.
        """
        stored = self._repository.get(identifier)
        if stored is None:
            raise NotFound("prediction", identifier)
        prediction = Prediction.model_validate(stored.result)
        return PredictionOut(id=stored.id, created_at=stored.created_at, prediction=prediction)


def _plans(names: list[str]) -> list[Plan]:
    """Look names up; all wrong ones are reported at once."""
    plans: dict[str, Plan] = {}
    problems: list[FieldProblem] = []
    for index, name in enumerate(names):
        field = f"plans.{index}"
        if name in plans:
            problems.append(FieldProblem(field, show_value(name), "named twice", "Name each plan once."))
            continue
        try:
            plans[name] = named_plan(name)
        except InvalidPlanError as error:
            problems += [replace(problem, field=field) for problem in error.problems]
    if problems:
        raise InvalidPlanError("plans: unusable", problems)
    return list(plans.values())
