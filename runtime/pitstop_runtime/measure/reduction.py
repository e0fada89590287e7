"""From each rank's spans to one record: maxima, minima and who was slowest, off the critical path.

Ranks send a fixed row of numbers to rank 0 over a gloo group of their own, in a thread; nothing that a
trainer waits for. A rank that dies meanwhile costs the record, nothing else.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import torch
import torch.distributed as dist

from pitstop.components import Component, Phase
from pitstop.telemetry import MemoryRecord, PhaseRecord, ProcessCounts, StepRecord
from pitstop_runtime.errors import first_line
from pitstop_runtime.measure.memory import MemorySample
from pitstop_runtime.measure.spans import PhaseSpans

_log = logging.getLogger(__name__)

_COMPONENTS = tuple(Component)
_PER_PHASE = 1 + 2 * len(_COMPONENTS)
_PHASES = tuple(Phase)
_QUEUE = 64


@dataclass(slots=True)
class RankStep:
    """One switch as one rank saw it."""

    step: int
    plan: str
    phases: dict[Phase, PhaseSpans] = field(default_factory=dict)
    at_sync: MemorySample = field(default_factory=MemorySample)
    in_rollout: MemorySample = field(default_factory=MemorySample)
    pinned: int | None = None
    counts: ProcessCounts = field(
        default_factory=lambda: ProcessCounts(communicators=0, sockets=0, threads=0)
    )
    fallback: str | None = None

    def row(self) -> torch.Tensor:
        """All numbers in a fixed order; not a number where not measured."""
        row: list[float] = []
        for phase in _PHASES:
            spans = self.phases.get(phase)
            row.append(math.nan if spans is None else spans.total_s)
            for seconds in (spans.components_s, spans.overlapped_s) if spans else ({}, {}):
                row += [seconds.get(component, math.nan) for component in _COMPONENTS]
        row += [math.nan if value is None else float(value) for value in self._bytes()]
        row += [self.counts.communicators, self.counts.sockets, self.counts.threads, self.step]
        return torch.tensor(row, dtype=torch.float64)

    def _bytes(self) -> tuple[int | None, ...]:
        sync = self.at_sync
        return (
            sync.device,
            self.in_rollout.device,
            sync.process,
            sync.allocator,
            sync.communicators,
            self.pinned,
        )


class Reduction:
    """Reduces steps in a thread; ``sink`` gets a record on rank 0. Made by all ranks at the same point.

    A rank waits ``timeout_s`` for the others' steps, but only ``meeting_s`` for them to be there now.
    """

    def __init__(
        self,
        timeout_s: float,
        sink: Callable[[StepRecord], None] | None,
        meeting_s: float | None = None,
    ) -> None:
        limit = timedelta(seconds=meeting_s or timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=limit, group_desc="PITSTOP_TELEMETRY")
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), self._group)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._sink = sink
        self._queue: queue.SimpleQueue[RankStep | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pitstop-reduction", daemon=True)
        self._thread.start()

    def submit(self, step: RankStep) -> None:
        """Hand a step over; every rank has to hand over the same steps."""
        if not self._thread.is_alive():  # it ends when ranks cannot be reached
            return
        if self._queue.qsize() >= _QUEUE:
            _log.warning("step %d is not recorded: %d steps wait to be reduced", step.step, _QUEUE)
            return
        self._queue.put(step)

    def close(self, timeout_s: float) -> None:
        """Reduce what is there and end the thread."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("step records were still being reduced after %g s and are lost", timeout_s)
        elif self._group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(self._group)

    def _run(self) -> None:
        while (step := self._queue.get()) is not None:
            try:
                rows = self._gather(step.row())
            except Exception as error:  # telemetry never harms a run
                _log.warning("step records end here: %s", first_line(error))
                return
            if rows is not None and self._sink is not None:
                self._hand_over(step, rows, self._sink)

    @staticmethod
    def _hand_over(step: RankStep, rows: torch.Tensor, sink: Callable[[StepRecord], None]) -> None:
        try:
            sink(record_of(step, rows))
        except Exception as error:  # the next one may be fine
            _log.warning("step %d is not recorded: %s", step.step, first_line(error))

    def _gather(self, row: torch.Tensor) -> torch.Tensor | None:
        """Rows of all ranks on rank 0, shape (ranks, numbers)."""
        rows = [torch.empty_like(row) for _ in range(self._size)] if self._rank == 0 else None
        dist.gather(row, rows, dst=0, group=self._group)
        if rows is None:
            return None
        table = torch.stack(rows)
        steps = table[:, -1].unique()
        if len(steps) > 1:
            raise ValueError(f"ranks sent different steps: {steps.tolist()}")
        return table[:, :-1]


def record_of(step: RankStep, rows: torch.Tensor) -> StepRecord:
    """One record of a step from the rows of all ranks, shape (ranks, numbers)."""
    phases = {
        phase: _phase(rows[:, i * _PER_PHASE : (i + 1) * _PER_PHASE])
        for i, phase in enumerate(_PHASES)
        if not rows[:, i * _PER_PHASE].isnan().all()
    }
    totals = rows[:, [i * _PER_PHASE for i in range(len(_PHASES))]].nan_to_num(0.0).sum(dim=1)
    start = len(_PHASES) * _PER_PHASE
    sync, rollout, process, allocator, communicators, pinned, *counts = _column_maxima(rows[:, start:])
    return StepRecord(
        step=step.step,
        plan=step.plan,
        phases=phases,
        memory=MemoryRecord(
            held_at_sync_bytes=_whole(sync),
            held_in_rollout_bytes=_whole(rollout),
            process_at_sync_bytes=_whole(process),
            allocator_at_sync_bytes=_whole(allocator),
            communicators_bytes=_whole(communicators),
            host_pinned_bytes=_whole(pinned),
        ),
        slowest_rank=int(totals.argmax()),
        fallback=step.fallback,
        counts=ProcessCounts(
            **{name: int(value) for name, value in zip(ProcessCounts.model_fields, counts, strict=True)}
        ),
        recorded_at=datetime.now(UTC),
    )


def _phase(rows: torch.Tensor) -> PhaseRecord:
    slowest = int(rows[:, 0].nan_to_num(-1.0).argmax())
    record: dict[str, dict[Component, float]] = {"components_s": {}, "overlapped_s": {}, "fastest_s": {}}
    ranks: dict[Component, int] = {}
    for i, component in enumerate(_COMPONENTS):
        waited, beside = rows[:, 1 + i], rows[:, 1 + len(_COMPONENTS) + i]
        if not waited.isnan().all():
            filled = waited.nan_to_num(0.0)
            record["components_s"][component] = float(filled[slowest])
            record["fastest_s"][component] = float(filled.min())
            ranks[component] = int(filled.argmax())
        if not beside.isnan().all():
            record["overlapped_s"][component] = float(beside.nan_to_num(0.0)[slowest])
    return PhaseRecord(total_s=float(rows[slowest, 0]), slowest_ranks=ranks, **record)


def _column_maxima(rows: torch.Tensor) -> list[float]:
    known = rows.nan_to_num(-1.0).amax(dim=0)
    return [math.nan if value < 0 else float(value) for value in known]


def _whole(value: float) -> int | None:
    return None if math.isnan(value) else int(value)
