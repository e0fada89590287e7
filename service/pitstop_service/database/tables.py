"""All tables in one place, for migrations: importing this module registers every domain's models."""

from __future__ import annotations

from pitstop_service.predictions.models import StoredPrediction
from pitstop_service.runs.models import StoredRun, StoredStep

from .base import Base

METADATA = Base.metadata
TABLES = (StoredPrediction, StoredRun, StoredStep)
