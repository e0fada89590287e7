"""The application factory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from pitstop import __version__

from .database.unit_of_work import Database
from .health.endpoints import router as health_router
from .predictions.endpoints import router as predictions_router
from .predictions.predictor import PredictionSlots, Predictor, simulate
from .runs.endpoints import router as runs_router
from .settings import Settings
from .web import openapi, problems
from .web.body_limit import BodyLimit

_DESCRIPTION = """Predict what a trainer/rollout switch of colocated RL training costs, and record what it did cost.

Seconds are seconds, bytes are bytes. Every error is a problem document (RFC 9457) that says what to do."""


def create_app(settings: Settings | None = None, *, predictor: Predictor = simulate) -> FastAPI:
    """Make the application. It neither connects nor migrates: `/healthz/ready` tells whether the schema is there.

    Args:
        settings: by default from the environment.
        predictor: what computes predictions; the simulator by default.

    Raises:
        InvalidInputError: the database URL is unusable.
    """
    settings = settings or Settings()
    database = Database.open(settings.database_url)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        database.close()

    app = FastAPI(title="Pitstop", version=__version__, description=_DESCRIPTION, lifespan=lifespan)
    app.state.database = database
    app.state.predictor = predictor
    app.state.prediction_slots = PredictionSlots(settings.prediction_workers, settings.prediction_queue)
    respond = problems.install(app)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes, respond=respond)
    for router in (predictions_router, runs_router, health_router):
        app.include_router(router)
    openapi.install(app)
    return app
