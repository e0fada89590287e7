"""HTTP endpoints for predictions."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Body, Depends, Path, Request, Response

from pitstop_service.database.unit_of_work import ReadSession, WriteSession
from pitstop_service.web.openapi import problem_responses
from pitstop_service.web.strict_json import StrictRoute

from .predictor import PredictionSlots, Predictor
from .repository import PredictionRepository
from .schemas import PREDICTION_EXAMPLES, PredictionOut, PredictionRequest
from .service import PredictionService

router = APIRouter(prefix="/v1/predictions", tags=["predictions"], route_class=StrictRoute)


def get_predictor(request: Request) -> Predictor:
    """The predictor in force."""
    predictor: Predictor = request.app.state.predictor
    return predictor


def _slots(request: Request) -> PredictionSlots:
    slots: PredictionSlots = request.app.state.prediction_slots
    return slots


PredictorInForce = Annotated[Predictor, Depends(get_predictor)]
Slots = Annotated[PredictionSlots, Depends(_slots)]


# A plain function, not a coroutine: FastAPI runs it in a worker thread, since a prediction is pure computation.
@router.post("", status_code=201, responses=problem_responses(413, 415, 422, 500, 503))
def create_prediction(
    payload: Annotated[PredictionRequest, Body(openapi_examples=PREDICTION_EXAMPLES)],
    session: WriteSession,
    predictor: PredictorInForce,
    slots: Slots,
    request: Request,
    response: Response,
) -> PredictionOut:
    """Predict what each switch plan would cost on a scenario, and recommend one."""
    created = PredictionService(PredictionRepository(session), predictor, slots).create(payload)
    response.headers["Location"] = str(request.app.url_path_for("get_prediction", prediction_id=created.id))
    return created


@router.get("/{prediction_id}", responses=problem_responses(404, 422, 500, 503))
def get_prediction(
    prediction_id: Annotated[UUID, Path(description="identifier of a prediction")],
    session: ReadSession,
    predictor: PredictorInForce,
    slots: Slots,
) -> PredictionOut:
    """Look a stored prediction up."""
    return PredictionService(PredictionRepository(session), predictor, slots).get(str(prediction_id))
