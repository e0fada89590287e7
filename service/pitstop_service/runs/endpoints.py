"""HTTP endpoints for runs."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Body, Path, Query, Request, Response

from pitstop.telemetry import RunManifest
from pitstop_service.database.unit_of_work import ReadSession, WriteSession
from pitstop_service.web.openapi import problem_responses
from pitstop_service.web.strict_json import StrictRoute

from .repository import RunRepository
from .schemas import RUN_EXAMPLES, STEP_EXAMPLES, RunCreated, RunOut, StepBatch, StepBatchOut, StepPage
from .service import RunService

router = APIRouter(prefix="/v1/runs", tags=["runs"], route_class=StrictRoute)

RunId = Annotated[UUID, Path(description="identifier of a run")]


@router.post("", status_code=201, responses=problem_responses(413, 415, 422, 500, 503))
def create_run(
    manifest: Annotated[RunManifest, Body(openapi_examples=RUN_EXAMPLES)],
    session: WriteSession,
    request: Request,
    response: Response,
) -> RunCreated:
    """Register a run, before its first step."""
    created = RunService(RunRepository(session)).create(manifest)
    response.headers["Location"] = str(request.app.url_path_for("get_run", run_id=created.id))
    return created


@router.get("/{run_id}", responses=problem_responses(404, 422, 500, 503))
def get_run(run_id: RunId, session: ReadSession) -> RunOut:
    """Look a run up: manifest, number of steps, and seconds per phase over the steady steps."""
    return RunService(RunRepository(session)).get(str(run_id))


@router.post("/{run_id}/steps", responses=problem_responses(404, 409, 413, 415, 422, 500, 503))
def add_steps(
    run_id: RunId, batch: Annotated[StepBatch, Body(openapi_examples=STEP_EXAMPLES)], session: WriteSession
) -> StepBatchOut:
    """Store a batch of steps: all of them or none. Sending a batch again is safe."""
    return RunService(RunRepository(session)).add_steps(str(run_id), batch.steps)


@router.get("/{run_id}/steps", responses=problem_responses(404, 422, 500, 503))
def list_steps(
    run_id: RunId,
    session: ReadSession,
    after: Annotated[int, Query(ge=-1, le=2**53, description="only steps with a larger number")] = -1,
    limit: Annotated[int, Query(ge=1, le=1000, description="most steps of one page")] = 100,
) -> StepPage:
    """List steps in the order of their numbers, page by page."""
    return RunService(RunRepository(session)).steps(str(run_id), after, limit)
