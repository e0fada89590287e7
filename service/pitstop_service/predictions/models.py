"""The table of predictions."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from pitstop_service.database.base import Base


class StoredPrediction(Base):
    """A prediction with the request that led to it, so that it can be made again."""

    __tablename__ = "predictions"
    __table_args__ = (Index(None, "scenario_digest", "created_at"),)

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    created_at: Mapped[datetime]
    scenario_name: Mapped[str] = mapped_column(String(120))
    scenario_digest: Mapped[str] = mapped_column(String(64))
    calibration_id: Mapped[str] = mapped_column(String(200))
    recommended: Mapped[str] = mapped_column(String(60))
    budget_bytes: Mapped[int | None] = mapped_column(BigInteger)
    request: Mapped[dict[str, Any]]
    result: Mapped[dict[str, Any]]
