"""What a switch took: spans of one rank, their reduction over ranks, memory, counts and leaks.

Each ``case_`` function runs on every rank.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
import torch
from rank_server import logged, on_ranks

from pitstop.components import Component, Phase
from pitstop.telemetry import ProcessCounts, StepRecord
from pitstop_runtime.measure.counts import LeakWatch, count
from pitstop_runtime.measure.memory import MemorySample, sample
from pitstop_runtime.measure.reduction import RankStep, Reduction, record_of
from pitstop_runtime.measure.spans import PhaseSpans, Spans

RELEASE, PAUSE, CANARY = Component.GROUP_RELEASE, Component.SAVER_PAUSE, Component.CANARY
PATIENT_S = 20.0


def idle() -> None:
    """No device to wait for."""


# Spans.


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("pitstop_runtime.measure.spans.time", clock)
    return clock


def test_spans_add_up_by_component(clock: Clock) -> None:
    spans = Spans(idle)
    with spans.phase(Phase.SLEEP):
        for _ in range(2):
            with spans.component(Phase.SLEEP, PAUSE):
                clock.sleep(3)
            clock.sleep(1)  # belongs to the phase alone
        with spans.component(Phase.SLEEP, CANARY):
            clock.sleep(0.5)
    with spans.phase(Phase.SLEEP):  # gone through twice, counts twice
        clock.sleep(10)
    assert spans.phases == {Phase.SLEEP: PhaseSpans(18.5, {PAUSE: 6.0, CANARY: 0.5}, {})}


def test_what_runs_beside_is_no_part_of_the_waiting(clock: Clock) -> None:
    spans = Spans(idle)
    with spans.phase(Phase.SLEEP):
        beside = spans.overlapped(Phase.SLEEP, RELEASE)
        with spans.component(Phase.SLEEP, PAUSE):
            beside.__enter__()  # as a thread would
            clock.sleep(2)
            assert spans.now == (Phase.SLEEP, PAUSE), "what is beside is not what is waited for"
        with spans.component(Phase.SLEEP, RELEASE):
            clock.sleep(1)
            beside.__exit__(None, None, None)
            assert spans.now == (Phase.SLEEP, RELEASE)
    assert spans.phases == {Phase.SLEEP: PhaseSpans(3.0, {PAUSE: 2.0, RELEASE: 1.0}, {RELEASE: 3.0})}


def test_the_device_is_waited_for_at_the_ends_of_a_phase_only() -> None:
    seen: list[str] = []
    spans = Spans(lambda: seen.append("synchronize"), lambda phase, what: seen.append(f"{phase}/{what}"))
    with spans.phase(Phase.WAKE_UP):
        with spans.component(Phase.WAKE_UP, Component.SAVER_RESUME):
            seen.append("resuming")
        with spans.overlapped(Phase.WAKE_UP, Component.GROUP_RESTORE):
            pass
    assert seen == [
        "synchronize",
        "wake_up/saver.resume",
        "resuming",
        "wake_up/group.restore",
        "synchronize",
    ]


def test_device_work_left_behind_is_in_the_total_and_earlier_work_is_not(clock: Clock) -> None:
    spans = Spans(lambda: clock.sleep(5))
    with spans.phase(Phase.SLEEP), spans.component(Phase.SLEEP, PAUSE):
        clock.sleep(1)
    assert spans.phases == {Phase.SLEEP: PhaseSpans(6.0, {PAUSE: 1.0}, {})}


def test_an_error_is_placed_in_the_component_that_raised_it(clock: Clock) -> None:
    spans = Spans(idle)
    places = []

    def fail() -> None:
        with spans.phase(Phase.SLEEP):
            places.append(spans.now)
            with spans.component(Phase.SLEEP, CANARY):
                places.append(spans.now)
            places.append(spans.now)
            try:
                with spans.component(Phase.SLEEP, PAUSE):
                    clock.sleep(2)
                    raise ZeroDivisionError
            finally:
                places.append(spans.now)

    with pytest.raises(ZeroDivisionError):
        fail()
    assert places == [None, (Phase.SLEEP, CANARY), None, (Phase.SLEEP, PAUSE)]
    assert spans.now is None
    assert spans.phases == {Phase.SLEEP: PhaseSpans(2.0, {CANARY: 0.0, PAUSE: 2.0}, {})}, "it took its time"


def test_threads_may_add_to_one_component() -> None:
    spans = Spans(idle)

    def add() -> None:
        for _ in range(200):
            with spans.overlapped(Phase.SLEEP, RELEASE):
                pass

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert spans.phases[Phase.SLEEP].overlapped_s[RELEASE] > 0


# From rows to a record.


def phase_of(total: float, beside: dict[Component, float] | None = None, **waited: float) -> PhaseSpans:
    return PhaseSpans(
        total, {Component(name.replace("_", ".", 1)): s for name, s in waited.items()}, beside or {}
    )


def reduced(*ranks: RankStep) -> StepRecord:
    return record_of(ranks[0], torch.stack([each.row() for each in ranks])[:, :-1])


def test_a_record_has_the_slowest_rank_per_phase_and_component() -> None:
    sleeps = (
        phase_of(1.0, saver_pause=0.2, group_release=0.7),
        phase_of(3.0, {RELEASE: 2.5}, saver_pause=2.0, cooldown=0.5),
        phase_of(2.0, {RELEASE: 9.0}, saver_pause=1.5, cooldown=0.0),
    )
    wakes = (phase_of(9.0), phase_of(1.0), phase_of(2.0))
    record = reduced(
        *(
            RankStep(7, "lean", {Phase.SLEEP: sleep, Phase.WAKE_UP: wake}, fallback="why")
            for sleep, wake in zip(sleeps, wakes, strict=True)
        )
    )
    sleep = record.phases[Phase.SLEEP]
    assert sleep.total_s == 3.0
    assert sleep.components_s == {RELEASE: 0.0, PAUSE: 2.0, Component.COOLDOWN: 0.5}
    assert sleep.fastest_s == {RELEASE: 0.0, PAUSE: 0.2, Component.COOLDOWN: 0.0}
    assert sleep.slowest_ranks == {RELEASE: 0, PAUSE: 1, Component.COOLDOWN: 1}
    assert sleep.overlapped_s == {RELEASE: 2.5}, "that of the slowest rank, not the longest"
    assert sum(sleep.components_s.values()) <= sleep.total_s
    assert record.phases[Phase.WAKE_UP].total_s == 9.0
    assert set(record.phases) == {Phase.SLEEP, Phase.WAKE_UP}
    assert record.slowest_rank == 0, "of the whole switch: 10 s"
    assert (record.step, record.plan, record.fallback) == (7, "lean", "why")
    assert record.recorded_at is not None


def test_memory_and_counts_are_those_of_the_rank_that_has_most() -> None:
    def step(device: int | None, process: int | None, rollout: int | None, pinned: int | None) -> RankStep:
        return RankStep(
            1,
            "keep",
            {Phase.SLEEP: phase_of(1.0)},
            at_sync=MemorySample(device=device, process=process, communicators=2**40 + 1),
            in_rollout=MemorySample(device=rollout),
            pinned=pinned,
            counts=ProcessCounts(communicators=3, sockets=pinned or 0, threads=9),
        )

    record = reduced(step(10, None, 5, 0), step(30, None, None, 8), step(20, None, 6, None))
    memory = record.memory.model_dump()
    assert memory == {
        "held_at_sync_bytes": 30,
        "held_in_rollout_bytes": 6,
        "process_at_sync_bytes": None,
        "allocator_at_sync_bytes": None,
        "communicators_bytes": 2**40 + 1,
        "host_pinned_bytes": 8,
    }
    assert record.counts == ProcessCounts(communicators=3, sockets=8, threads=9)


def test_a_phase_that_one_rank_alone_went_through() -> None:
    alone = RankStep(1, "keep", {Phase.SLEEP: phase_of(1.0, saver_pause=0.5), Phase.WAKE_UP: phase_of(2.0)})
    record = reduced(RankStep(1, "keep", {Phase.SLEEP: phase_of(0.1)}), alone)
    assert record.phases[Phase.WAKE_UP].total_s == 2.0
    assert record.phases[Phase.SLEEP].components_s == {PAUSE: 0.5}
    assert record.slowest_rank == 1


def test_every_number_of_a_row_has_its_place() -> None:
    """Distinct values in, each of them out where it belongs: rows and records agree on the order."""
    values = {component: 1.0 + i / 100 for i, component in enumerate(Component)}
    beside = {component: 2.0 + i / 100 for i, component in enumerate(Component)}
    phases = {phase: PhaseSpans(100.0 + i, dict(values), dict(beside)) for i, phase in enumerate(Phase)}
    memory = MemorySample(device=1, process=2, allocator=3, communicators=4)
    counts = ProcessCounts(communicators=7, sockets=8, threads=9)
    record = reduced(RankStep(5, "keep", phases, memory, MemorySample(device=5), 6, counts))
    for i, phase in enumerate(Phase):
        assert record.phases[phase].total_s == 100.0 + i
        assert record.phases[phase].components_s == values == record.phases[phase].fastest_s
        assert record.phases[phase].overlapped_s == beside
    assert list(record.memory.model_dump().values()) == [1, 5, 2, 3, 4, 6]
    assert record.counts == counts


def test_nothing_measured_is_not_zero() -> None:
    row = RankStep(1, "keep").row()
    assert all(math.isnan(value) for value in row[:-4])
    assert sample([]) == MemorySample(), "without a device"


# The reduction, over ranks.


def case_reduce() -> list[dict[str, Any]]:
    """Rank 2 hands its steps over late; the records, on rank 0."""
    import torch.distributed as dist

    rank = dist.get_rank()
    records: list[StepRecord] = []
    reduction = Reduction(PATIENT_S, records.append)
    if rank == 2:
        time.sleep(0.6)
    started = time.monotonic()
    for number in range(3):
        waited = {PAUSE: (rank + number) % 3 + 0.5}
        reduction.submit(RankStep(number, "keep", {Phase.SLEEP: PhaseSpans(float(rank + 1), waited)}))
    assert time.monotonic() - started < 0.3, "a trainer waits for nobody's numbers"
    assert rank != 0 or not records, "rank 2 has not sent its row yet"
    reduction.close(PATIENT_S)
    reduction.submit(RankStep(9, "keep"))  # too late, harmless
    reduction.close(0.1)
    return [record.model_dump(mode="json") for record in records]


def test_steps_are_reduced_on_rank_0_off_the_critical_path() -> None:
    records, *others = on_ranks(case_reduce, 3)
    assert others == [[], []]
    assert [record["step"] for record in records] == [0, 1, 2]
    for number, record in enumerate(records):
        sleep = record["phases"]["sleep"]
        assert sleep["total_s"] == 3.0
        assert sleep["components_s"] == {"saver.pause": (2 + number) % 3 + 0.5}, (
            "of the rank that held all up"
        )
        assert sleep["fastest_s"] == {"saver.pause": 0.5}
        assert sleep["slowest_ranks"] == {"saver.pause": (2 - number) % 3}
        assert record["slowest_rank"] == 2


def case_bad_sink() -> tuple[list[int], list[str]]:
    taken: list[int] = []

    def sink(record: StepRecord) -> None:
        if record.step == 1:
            raise OSError("disk full\nand more")
        taken.append(record.step)

    with logged() as said:
        reduction = Reduction(PATIENT_S, sink)
        for number in range(3):
            reduction.submit(RankStep(number, "keep", {Phase.SLEEP: PhaseSpans(1.0)}))
        reduction.submit(RankStep(3, "keep"))  # no phase: not a record
        reduction.submit(RankStep(4, "keep", {Phase.SLEEP: PhaseSpans(1.0)}))
        reduction.close(PATIENT_S)
    return taken, said


def test_a_record_that_cannot_be_handed_over_costs_that_record() -> None:
    (taken, said), (nothing, silence) = on_ranks(case_bad_sink, 2)
    assert taken == [0, 2, 4]
    assert said[0] == "step 1 is not recorded: disk full"
    assert said[1].startswith("step 3 is not recorded: 1 validation error")
    assert (nothing, silence, len(said)) == ([], [], 2)


def case_different_steps() -> tuple[list[int], list[str], float]:
    import torch.distributed as dist

    records: list[StepRecord] = []
    with logged() as said:
        reduction = Reduction(PATIENT_S, records.append)
        for number in (5, 6 + dist.get_rank()):
            reduction.submit(RankStep(number, "keep", {Phase.SLEEP: PhaseSpans(1.0)}))
        time.sleep(0.5)
        started = time.monotonic()
        reduction.close(PATIENT_S)
    return [record.step for record in records], said, time.monotonic() - started


def test_ranks_out_of_step_end_the_records_and_nothing_else() -> None:
    (steps, said, seconds), *_ = on_ranks(case_different_steps, 2)
    assert steps == [5]
    assert said == ["step records end here: ranks sent different steps: [6.0, 7.0]"]
    assert seconds < 1.0


def case_dead_thread_and_full_queue() -> tuple[float, list[str]]:
    """The thread ends at a failure while the queue behind it is full; how long ``close`` takes then."""
    reduction = Reduction(PATIENT_S, None)
    inside, fail = threading.Event(), threading.Event()

    def gather(_: torch.Tensor) -> None:
        inside.set()
        fail.wait(10)
        raise RuntimeError("connection closed by peer")

    reduction._gather = gather  # type: ignore[method-assign, assignment]
    with logged() as said:
        reduction.submit(RankStep(0, "keep"))
        assert inside.wait(10)
        for number in range(1, 70):
            reduction.submit(RankStep(number, "keep"))
        fail.set()
        time.sleep(0.2)
        started = time.monotonic()
        reduction.close(5.0)
        seconds = time.monotonic() - started
        reduction.submit(RankStep(70, "keep"))
    return seconds, said


def test_closing_after_a_failure_with_a_full_queue_does_not_block() -> None:
    ((seconds, said),) = on_ranks(case_dead_thread_and_full_queue, 1)
    assert seconds < 1.0
    assert said[:5] == [f"step {n} is not recorded: 64 steps wait to be reduced" for n in range(65, 70)]
    assert said[5:] == ["step records end here: connection closed by peer"]


def case_stuck_thread() -> tuple[float, list[str]]:
    reduction = Reduction(PATIENT_S, None)
    reduction._gather = lambda _: threading.Event().wait(10)  # type: ignore[method-assign, assignment, return-value]
    with logged() as said:
        for number in range(66):
            reduction.submit(RankStep(number, "keep"))
            time.sleep(0.001)
        started = time.monotonic()
        reduction.close(0.3)
    return time.monotonic() - started, said


def test_closing_waits_no_longer_than_asked() -> None:
    ((seconds, said),) = on_ranks(case_stuck_thread, 1)
    assert 0.3 <= seconds < 1.0
    assert said[-1] == "step records were still being reduced after 0.3 s and are lost"


# Leaks.


def grown(*sockets: int) -> list[list[str]]:
    watch = LeakWatch()
    return [watch.add(ProcessCounts(communicators=4, sockets=n, threads=20)) for n in sockets]


def test_growth_in_every_switch_is_an_alarm(caplog: pytest.LogCaptureFixture) -> None:
    *before, first, second = grown(10, 30, 50, 70, 90, 110, 130)
    assert before == [[]] * 5
    assert first == [
        "sockets rose in each of the last 5 switches, from 10 to 110: something is not torn down. "
        "Look for groups made anew in each step."
    ]
    assert "from 30 to 130" in second[0]
    assert [record.getMessage() for record in caplog.records] == [*first, *second]


@pytest.mark.parametrize(
    "sockets",
    [
        [10] * 12,
        [10, 40, 10, 40, 10, 40, 10, 40, 10, 40],  # comes and goes
        [10, 11, 12, 13, 14, 14, 15, 16, 17, 18, 18],  # stands still in between
        [90, 80, 70, 60, 50, 40, 30],
        [10, 60, 60, 60, 60, 60, 60, 60],  # the first switch builds more than was there
        [10, 30, 50, 70, 90, 85],
    ],
)
def test_noise_is_none(sockets: list[int]) -> None:
    assert all(not alarms for alarms in grown(*sockets))


def test_a_leak_of_one_per_switch_is_found_too() -> None:
    assert grown(10, 11, 12, 13, 14, 15)[-1]


def test_each_count_is_watched() -> None:
    watch = LeakWatch()
    for n in range(6):
        alarms = watch.add(ProcessCounts(communicators=n, sockets=2 * n, threads=3 * n))
    assert [alarm.split()[0] for alarm in alarms] == ["communicators", "sockets", "threads"]


def test_counts_are_those_of_the_process() -> None:
    import socket

    before = count(3)
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    with socket.socket(), socket.socket():
        during = count(4)
    release.set()
    thread.join()
    assert (before.communicators, during.communicators) == (3, 4)
    assert during.sockets == before.sockets + 2
    assert during.threads == before.threads + 1
