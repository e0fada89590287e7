"""Queries on predictions."""

from __future__ import annotations

from sqlalchemy.orm import Session

from .models import StoredPrediction


class PredictionRepository:
    """Predictions of one unit of work."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, prediction: StoredPrediction) -> None:
        """Store a new prediction."""
        self._session.add(prediction)
        self._session.flush()

    def get(self, identifier: str) -> StoredPrediction | None:
        """Look a prediction up."""
        return self._session.get(StoredPrediction, identifier)
