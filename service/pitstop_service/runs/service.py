"""Register runs, take steps in, summarise."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pitstop.components import Phase
from pitstop.loading import digest
from pitstop.telemetry import RunManifest, StepRecord
from pitstop_service.web.problems import NotFound, StepConflict

from .models import StoredRun
from .repository import Moments, RunRepository
from .schemas import PhaseSummary, RunCreated, RunOut, RunSummary, StepBatchOut, StepPage


class RunService:
    """What the endpoints do, without HTTP and without commit."""

    def __init__(self, repository: RunRepository) -> None:
        self._repository = repository

    def create(self, manifest: RunManifest) -> RunCreated:
        """Register a run."""
        run = StoredRun(
            id=str(uuid.uuid4()),
            created_at=datetime.now(UTC),
            scenario_name=manifest.scenario.name,
            scenario_digest=digest(manifest.scenario),
            plan_name=manifest.plan.name,
            arm=manifest.arm,
            pair_id=manifest.pair_id,
            warmup_steps=manifest.warmup_steps,
            started_at=manifest.started_at,
            manifest=manifest.model_dump(mode="json"),
        )
        self._repository.add(run)
        return RunCreated(id=run.id, created_at=run.created_at)

    def add_steps(self, run_id: str, records: Sequence[StepRecord]) -> StepBatchOut:
        """Store steps, all or none. A trainer that saw no answer sends its batch again: equal content is accepted.

        Raises:
            NotFound: there is no such run.
            StepConflict: a step is stored, or occurs in the batch, with different content.
        """
        new: dict[int, tuple[str, StepRecord]] = {}
        conflicts: set[int] = set()
        for record in records:
            content = digest(record)
            if new.setdefault(record.step, (content, record))[0] != content:
                conflicts.add(record.step)
        if not self._repository.lock(run_id):
            raise NotFound("run", run_id)
        for step, stored in self._repository.digests(run_id, list(new)).items():
            if new.pop(step)[0] != stored:
                conflicts.add(step)
        if conflicts:
            raise StepConflict(sorted(conflicts))
        now = datetime.now(UTC)
        self._repository.add_steps([_row(run_id, content, record, now) for content, record in new.values()])
        return StepBatchOut(stored=len(new), duplicates=len(records) - len(new))

    def get(self, run_id: str) -> RunOut:
        """Look a run up and summarise its steady steps.

        Raises:
            NotFound: there is no such run.
        """
        run = self._find(run_id)
        count = self._repository.count(run_id)
        moments = self._repository.moments(run_id, run.warmup_steps)
        return RunOut(
            id=run.id,
            created_at=run.created_at,
            manifest=RunManifest.model_validate(run.manifest),
            step_count=count,
            summary=RunSummary(
                steady_steps=max(count - run.warmup_steps, 0),
                phases={phase: _summary(values) for phase, values in moments.items()},
            ),
        )

    def steps(self, run_id: str, after: int, limit: int) -> StepPage:
        """One page of steps.

        Raises:
            NotFound: there is no such run.
        """
        self._find(run_id)
        found = self._repository.page(run_id, after, limit + 1)  # one more tells whether another page follows
        records = [StepRecord.model_validate(record) for record in found[:limit]]
        return StepPage(steps=records, next_after=records[-1].step if len(found) > limit else None)

    def _find(self, run_id: str) -> StoredRun:
        run = self._repository.get(run_id)
        if run is None:
            raise NotFound("run", run_id)
        return run


def _row(run_id: str, content: str, record: StepRecord, now: datetime) -> dict[str, Any]:
    seconds = {
        f"{phase.value}_s": record.phases[phase].total_s if phase in record.phases else None
        for phase in Phase
    }
    return {
        "run_id": run_id,
        "step": record.step,
        "digest": content,
        "received_at": now,
        **seconds,
        "step_s": record.step_s,
        **record.memory.model_dump(
            include={"held_at_sync_bytes", "held_in_rollout_bytes", "host_pinned_bytes"}
        ),
        "record": record.model_dump(mode="json"),
    }


def _summary(values: Moments) -> PhaseSummary:
    sd = math.sqrt(values.squares / (values.n - 1)) if values.n > 1 else None
    return PhaseSummary(n=values.n, mean_s=values.mean, sd_s=sd)
