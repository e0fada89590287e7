"""The engine against closed forms, on schedules made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pitstop.components import Component, Phase
from pitstop.inventory import rank_classes
from pitstop.plan import NAMED_PLANS
from pitstop.scenario import Scenario
from pitstop_simulator.calibration import Calibration, Draws
from pitstop_simulator.costs import ClassCosts, SiteFactors
from pitstop_simulator.engine import SwitchResult, simulate
from pitstop_simulator.schedule import Operation, Schedule, build_schedule

C = Component


def op(component: Component, seconds: float, **changes: Any) -> Operation:
    return Operation(component, np.array([seconds]), **changes)


def schedule(
    sleep: list[Operation], update: list[Operation] | None = None, wake: list[Operation] | None = None
) -> Schedule:
    return Schedule(
        ranks=1,
        start_communicator_bytes=np.array([100.0]),
        saved_bytes=1000.0,
        overhead_bytes=np.array([10.0]),
        communicators=1,
        first_step_s=np.array([0.0]),
        phases={Phase.SLEEP: sleep, Phase.UPDATE_WEIGHTS: update or [], Phase.WAKE_UP: wake or []},
    )


def run(
    *schedules: Schedule, cooldown_s: float = 2.0, rollout_s: float = 5.0, ranks_per_gpu: int = 1
) -> SwitchResult:
    return simulate(
        list(schedules), 0, ranks_per_gpu=ranks_per_gpu, cooldown_s=cooldown_s, rollout_s=rollout_s
    )


def test_one_class_is_the_sum_of_its_operations() -> None:
    result = run(
        schedule(
            [op(C.CLEAR_MEMORY, 0.25), op(C.SAVER_PAUSE, 1.5, driver=True)],
            [op(C.WEIGHTS_GATHER, 0.125, joins=True), op(C.ENGINE_LOAD, 0.75)],
            [op(C.SAVER_RESUME, 0.5), op(C.GROUP_RESTORE, 0.0625, store=True)],
        )
    )
    assert result.phase_s[Phase.SLEEP] == pytest.approx(1.75, abs=1e-9)
    assert result.phase_s[Phase.UPDATE_WEIGHTS] == pytest.approx(0.875, abs=1e-9)
    assert result.phase_s[Phase.WAKE_UP] == pytest.approx(0.5625, abs=1e-9)
    assert result.switch_s == pytest.approx(3.1875, abs=1e-9)
    assert result.component_s[C.SAVER_PAUSE] == pytest.approx(1.5, abs=1e-9)
    assert sum(result.component_s.values()) == pytest.approx(result.switch_s, abs=1e-9)


@pytest.mark.parametrize(("work", "waited"), [(0.5, 1.5), (1.9, 0.1), (2.0, 0.0), (3.0, 0.0)])
def test_an_owed_cooldown_is_waited_for_only_as_long_as_it_still_runs(work: float, waited: float) -> None:
    result = run(
        schedule(
            [op(C.GROUP_RELEASE, 0.25, owes_cooldown=True), op(C.SAVER_PAUSE, work)],
            [op(C.COOLDOWN, 0.0, awaits_cooldown=True)],
        )
    )
    assert result.phase_s[Phase.SLEEP] == pytest.approx(0.25 + work, abs=1e-9)
    assert result.phase_s[Phase.UPDATE_WEIGHTS] == pytest.approx(waited, abs=1e-9)
    assert result.component_s.get(C.COOLDOWN, 0.0) == pytest.approx(waited, abs=1e-9)


@pytest.mark.parametrize(("rollout_s", "waited"), [(0.0, 2.0), (0.5, 1.5), (60.0, 0.0)])
def test_the_rollout_pays_for_an_owed_cooldown(rollout_s: float, waited: float) -> None:
    late = schedule(
        [], [op(C.GROUP_RELEASE, 0.25, owes_cooldown=True)], [op(C.COOLDOWN, 0.0, awaits_cooldown=True)]
    )
    result = run(late, rollout_s=rollout_s)
    assert result.phase_s[Phase.WAKE_UP] == pytest.approx(waited, abs=1e-9)
    assert result.switch_s == pytest.approx(0.25 + waited, abs=1e-9)


@pytest.mark.parametrize(
    ("release", "driver", "expected"),
    [
        (0.5, False, 1.0),  # hidden beside the copy
        (3.0, False, 3.0),  # joined at the end of the phase
        (0.5, True, 1.5),  # the driver does one thing at a time
    ],
)
def test_a_background_release_is_joined(release: float, driver: bool, expected: float) -> None:
    result = run(
        schedule([
            op(C.GROUP_RELEASE, release, background=True, driver=driver),
            op(C.SAVER_PAUSE, 1.0, driver=driver),
        ])
    )  # fmt: skip
    assert result.phase_s[Phase.SLEEP] == pytest.approx(expected, abs=1e-9)
    assert sum(result.component_s.values()) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("classes", [1, 2, 5])
def test_the_store_serves_one_class_at_a_time(classes: int) -> None:
    shared = run(*[schedule([op(C.GROUP_RESTORE, 0.5, store=True, joins=True)]) for _ in range(classes)])
    alone = run(*[schedule([op(C.SAVER_PAUSE, 0.5, driver=True, joins=True)]) for _ in range(classes)])
    assert shared.switch_s == pytest.approx(0.5 * classes, abs=1e-9)
    assert alone.switch_s == pytest.approx(0.5, abs=1e-9)


def test_collectives_and_phases_wait_for_the_slowest() -> None:
    fast = schedule([op(C.SAVER_PAUSE, 1.0), op(C.CANARY, 0.5, joins=True), op(C.CLEAR_MEMORY, 2.0)])
    slow = schedule([op(C.SAVER_PAUSE, 3.0), op(C.CANARY, 0.5, joins=True), op(C.CLEAR_MEMORY, 1.0)])
    result = run(fast, slow)
    assert result.switch_s == pytest.approx(3.5 + 2.0, abs=1e-9)
    assert sum(result.component_s.values()) == pytest.approx(result.switch_s, abs=1e-9)
    ahead = run(
        schedule([op(C.SAVER_PAUSE, 1.0)], [op(C.ENGINE_LOAD, 3.0)]), schedule([op(C.SAVER_PAUSE, 2.0)])
    )
    assert ahead.phase_s[Phase.UPDATE_WEIGHTS] == pytest.approx(3.0, abs=1e-9)


def test_bytes_are_reported_per_gpu_at_sync_and_in_the_rollout() -> None:
    result = run(
        schedule(
            [op(C.SAVER_PAUSE, 1.0, trainer_bytes=-1000.0)],
            [op(C.GROUP_RELEASE, 1.0, communicator_bytes=np.array([-100.0]))],
            [op(C.SAVER_RESUME, 1.0, trainer_bytes=1000.0)],
        ),
        ranks_per_gpu=2,
    )
    assert result.held_at_sync_bytes == 2 * 110
    assert result.held_in_rollout_bytes == 2 * 10
    assert result.peak_bytes == 2 * 1110


LAYOUTS: list[dict[str, Any]] = [
    {"layout": {"tp": 2}},
    {"layout": {"tp": 1}},
    {"hardware": {"gpu": "h200", "gpus_per_node": 8}, "layout": {"tp": 2, "pp": 4}},
    {"hardware": {"gpu": "h200", "gpus_per_node": 8}, "layout": {"pp": 4}},
    {
        "hardware": {"gpu": "h200", "gpus_per_node": 8, "nodes": 4},
        "layout": {"tp": 2, "pp": 4, "cp": 2, "ep": 4, "etp": 1},
        "model": "qwen3-30b-a3b",
    },
]


@pytest.mark.parametrize("creation", ["lazy", "eager"])
@pytest.mark.parametrize(
    "changes", LAYOUTS, ids=lambda c: "-".join(f"{k}{v}" for k, v in c["layout"].items())
)
@pytest.mark.parametrize("plan", NAMED_PLANS)
def test_every_plan_conserves_bytes(
    plan: str, changes: dict[str, Any], creation: str, make_scenario: Any, calibration: Calibration
) -> None:
    scenario: Scenario = make_scenario(**changes, trainer={"group_creation": creation})
    draws = Draws(calibration, 3, 3, foreign=False, steps=4)
    costs = [ClassCosts(scenario, c, draws) for c in rank_classes(scenario)]
    schedules = [build_schedule(c, NAMED_PLANS[plan], SiteFactors.none(draws)) for c in costs]
    # All classes meet at the same number of barriers in each phase, or some would wait for ever.
    for phase in Phase:
        assert len({sum(o.joins for o in s.phases[phase]) for s in schedules}) == 1, phase
    for draw in range(draws.count):
        for group in ([s] for s in schedules):
            result = simulate(group, draw, ranks_per_gpu=1, cooldown_s=2.0, rollout_s=60.0)
            first, last = result.timeline[0], result.timeline[-1]
            assert last.trainer_bytes == pytest.approx(first.trainer_bytes)
            assert last.communicator_bytes <= first.communicator_bytes * (1 + 1e-9)
            if creation == "eager" or NAMED_PLANS[plan].training in ("keep", "suspend"):
                assert last.communicator_bytes == pytest.approx(first.communicator_bytes)
            for moment in result.timeline:
                assert moment.trainer_bytes >= 0
                assert moment.communicator_bytes >= -1
                assert moment.total_bytes <= result.peak_bytes
        together = simulate(schedules, draw, ranks_per_gpu=1, cooldown_s=2.0, rollout_s=60.0)
        assert set(together.phase_s) == set(Phase)
        assert sum(together.component_s.values()) == pytest.approx(together.switch_s)


def test_the_same_seed_gives_the_same_switch(h200x2: Scenario, calibration: Calibration) -> None:
    def once(seed: int) -> list[float]:
        draws = Draws(calibration, 20, seed, foreign=False, steps=4)
        costs = [ClassCosts(h200x2, c, draws) for c in rank_classes(h200x2)]
        made = [build_schedule(c, NAMED_PLANS["reload"], SiteFactors.none(draws)) for c in costs]
        return [
            simulate(made, d, ranks_per_gpu=1, cooldown_s=2.0, rollout_s=60.0).switch_s for d in range(20)
        ]

    assert once(7) == once(7)
    assert once(7) != once(8)
