"""Queries on runs and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session

from pitstop.components import Phase

from .models import StoredRun, StoredStep

_LOOKUP_CHUNK = 5_000  # below the parameter limits of both databases


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean (seconds) and sum of squared deviations of one phase."""

    n: int
    mean: float | None
    squares: float


class RunRepository:
    """Runs and steps of one unit of work."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, run: StoredRun) -> None:
        """Store a new run."""
        self._session.add(run)
        self._session.flush()

    def get(self, run_id: str) -> StoredRun | None:
        """Look a run up."""
        return self._session.get(StoredRun, run_id)

    def lock(self, run_id: str) -> bool:
        """Take the run until the end of the unit of work, so that batches of one run follow each other.

        Returns whether there is such a run. SQLite has no row locks and needs none: one writer at a time.
        """
        query = select(StoredRun.id).where(StoredRun.id == run_id).with_for_update()
        return self._session.scalar(query) is not None

    def digests(self, run_id: str, steps: Sequence[int]) -> dict[int, str]:
        """Digests of those of the steps that are stored."""
        found: dict[int, str] = {}
        for start in range(0, len(steps), _LOOKUP_CHUNK):
            chunk = steps[start : start + _LOOKUP_CHUNK]
            query = select(StoredStep.step, StoredStep.digest).where(
                StoredStep.run_id == run_id, StoredStep.step.in_(chunk)
            )
            found.update((step, digest) for step, digest in self._session.execute(query))
        return found

    def add_steps(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Store new steps."""
        if rows:
            self._session.execute(insert(StoredStep), rows)

    def count(self, run_id: str) -> int:
        """Number of stored steps."""
        return self._session.scalar(select(func.count()).where(StoredStep.run_id == run_id)) or 0

    def page(self, run_id: str, after: int, limit: int) -> list[dict[str, Any]]:
        """Records of the next ``limit`` steps whose numbers are above ``after``."""
        query = (
            select(StoredStep.record)
            .where(StoredStep.run_id == run_id, StoredStep.step > after)
            .order_by(StoredStep.step)
            .limit(limit)
        )
        return list(self._session.scalars(query))

    def moments(self, run_id: str, skip: int) -> dict[Phase, Moments]:
        """Moments per phase over the steps after the first ``skip``.

        Two passes in the database: SQLite has no standard deviation, the textbook formula loses all digits where the
        spread is small, and a long run need not pass through memory.
        """
        columns = [getattr(StoredStep, f"{phase.value}_s").label(phase.value) for phase in Phase]
        steady = (
            select(*columns)
            .where(StoredStep.run_id == run_id)
            .order_by(StoredStep.step)
            .offset(skip)
            .subquery()
        )
        values = [steady.c[phase.value] for phase in Phase]
        first = self._session.execute(select(*[f(v) for v in values for f in (func.count, func.avg)])).one()
        means = [first[2 * i + 1] for i in range(len(values))]
        deviations = [v - (mean or 0.0) for v, mean in zip(values, means, strict=True)]
        second = self._session.execute(select(*[func.sum(d * d) for d in deviations])).one()
        return {phase: Moments(first[2 * i], means[i], second[i] or 0.0) for i, phase in enumerate(Phase)}
