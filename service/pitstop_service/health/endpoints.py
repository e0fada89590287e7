"""HTTP endpoints for supervisors and load balancers."""

from __future__ import annotations

import logging
from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field
from sqlalchemy.exc import SQLAlchemyError

from pitstop_service.database.migrations import schema_state
from pitstop_service.database.unit_of_work import Database, get_database
from pitstop_service.web.openapi import problem_responses
from pitstop_service.web.problems import Unavailable

router = APIRouter(prefix="/healthz", tags=["health"])

_log = logging.getLogger(__name__)


class Health(BaseModel):
    """The answer while all is well."""

    status: Literal["ok"] = Field(
        default="ok", description="always ok; otherwise the answer is a problem document"
    )


class Readiness(Health):
    """The answer of a service that can serve."""

    revision: str = Field(description="schema revision of the database")


@router.get("/live", responses=problem_responses(500))
async def live() -> Health:
    """Whether the process answers at all; asks nobody else."""
    return Health()


@router.get("/ready", responses=problem_responses(500, 503))
def ready(database: Annotated[Database, Depends(get_database)]) -> Readiness:
    """Whether the database can be reached and has the schema that this version needs."""
    try:
        state = schema_state(database.engine)
    except SQLAlchemyError as error:
        _log.error("database cannot be reached", exc_info=error)
        raise Unavailable("The database cannot be reached; see the service's log.") from None
    if not state.at_head:
        raise Unavailable(state.remedy)
    return Readiness(revision=state.head)
