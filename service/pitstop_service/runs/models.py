"""The tables of runs and steps. What summaries need is in columns; the whole record is kept beside it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Double, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from pitstop_service.database.base import Base


class StoredRun(Base):
    """A run: what stays the same over its steps."""

    __tablename__ = "runs"
    __table_args__ = (Index(None, "scenario_digest", "plan_name"),)

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    created_at: Mapped[datetime]
    scenario_name: Mapped[str] = mapped_column(String(120))
    scenario_digest: Mapped[str] = mapped_column(String(64))
    plan_name: Mapped[str] = mapped_column(String(60))
    arm: Mapped[str | None] = mapped_column(String(60))
    pair_id: Mapped[str | None] = mapped_column(String(100))
    warmup_steps: Mapped[int]
    started_at: Mapped[datetime | None]
    manifest: Mapped[dict[str, Any]]


class StoredStep(Base):
    """One switch as measured: seconds of the slowest rank, bytes per GPU."""

    __tablename__ = "steps"

    run_id: Mapped[str] = mapped_column(
        String(36), ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True
    )
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    digest: Mapped[str] = mapped_column(String(64))
    received_at: Mapped[datetime]
    sleep_s: Mapped[float | None] = mapped_column(Double)
    update_weights_s: Mapped[float | None] = mapped_column(Double)
    wake_up_s: Mapped[float | None] = mapped_column(Double)
    step_s: Mapped[float | None] = mapped_column(Double)
    held_at_sync_bytes: Mapped[int | None] = mapped_column(BigInteger)
    held_in_rollout_bytes: Mapped[int | None] = mapped_column(BigInteger)
    host_pinned_bytes: Mapped[int | None] = mapped_column(BigInteger)
    record: Mapped[dict[str, Any]]
