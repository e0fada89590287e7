"""The cost laws at their medians, against the measured figures of the design."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pitstop.inventory import Use, rank_classes
from pitstop.plan import NAMED_PLANS, Backup
from pitstop.scenario import Scenario
from pitstop.units import GB, GIB, MIB
from pitstop_simulator.calibration import Calibration, Draws
from pitstop_simulator.costs import PROXY_POLL_S, ClassCosts, SiteFactors

DRAWS = 50


@pytest.fixture(scope="module")
def draws(calibration: Calibration) -> Draws:
    return Draws(calibration, DRAWS, 0, foreign=False, steps=8)


def costs_of(scenario: Scenario, draws: Draws) -> ClassCosts:
    return ClassCosts(scenario, rank_classes(scenario)[0], draws)


@pytest.fixture(scope="module")
def costs(h200x2: Scenario, draws: Draws) -> ClassCosts:
    return costs_of(h200x2, draws)


@pytest.mark.parametrize(("cap", "mib"), [(1, 22), (4, 76), (None, 484)])
def test_memory_of_a_communicator(cap: int | None, mib: int, costs: ClassCosts) -> None:
    site = costs.cls.communicators()[0]
    assert costs.communicator(site, cap).bytes[0] / MIB == pytest.approx(mib, rel=0.02)


def test_a_cap_above_the_librarys_choice_changes_nothing(costs: ClassCosts) -> None:
    site = costs.cls.communicators()[0]
    free, capped = costs.communicator(site, None), costs.communicator(site, 64)
    assert (free.bytes == capped.bytes).all()
    assert (free.create_s == capped.create_s).all()


def test_creation_grows_with_bytes_and_sharing(costs: ClassCosts, make_scenario: Any, draws: Draws) -> None:
    site = costs.cls.communicators()[0]
    small, large = costs.communicator(site, 1).create_s[0], costs.communicator(site, None).create_s[0]
    assert 0.02 < small < large < 0.3
    hardware = {"gpu": "h200", "gpus_per_node": 2, "ranks_per_gpu": 2}
    shared = costs_of(make_scenario(hardware=hardware), draws)
    assert shared.communicator(site, None).create_s[0] > large


def test_eagerly_made_communicators_are_released_at_the_spacing_of_their_creation(costs: ClassCosts) -> None:
    made = costs.live(NAMED_PLANS["reload"])
    waits = costs.draws.waits(0, len(made) + 1, PROXY_POLL_S)
    spacing = sum(np.mod(c.create_s, PROXY_POLL_S) for c in made[1:])
    assert costs.release_s(made, waits) == pytest.approx(waits[0] + spacing, rel=1e-12)
    # Fourteen two-rank communicators took 2.5 s.
    fourteen = (made * 3)[:14]
    assert costs.release_s(fourteen, costs.draws.waits(0, 15, PROXY_POLL_S))[0] == pytest.approx(
        2.5, rel=0.25
    )


def test_lazily_made_communicators_wait_half_a_period_each(make_scenario: Any, draws: Draws) -> None:
    lazy = costs_of(make_scenario(trainer={"group_creation": "lazy"}), draws)
    made = lazy.live(NAMED_PLANS["reload"])
    waits = draws.waits(0, len(made) + 1, PROXY_POLL_S)
    assert made
    assert lazy.release_s(made, waits) == pytest.approx(waits[: len(made)].sum(axis=0), rel=1e-12)
    assert lazy.release_s(made, waits)[0] == pytest.approx(len(made) * PROXY_POLL_S / 2)
    assert (lazy.release_s([], waits) == 0).all()


def test_lazy_creation_has_only_what_is_used(make_scenario: Any, draws: Draws) -> None:
    lazy, eager = (
        costs_of(make_scenario(trainer={"group_creation": how}), draws).live(NAMED_PLANS["reload"])
        for how in ("lazy", "eager")
    )
    assert len(lazy) < len(eager)
    assert all(c.site.uses for c in lazy)


def test_sharing_leaves_one_communicator_per_rank_set(costs: ClassCosts) -> None:
    apart, shared = costs.live(NAMED_PLANS["reload"]), costs.live(NAMED_PLANS["lean"])
    assert len(shared) < len(apart)
    assert {c.site.ranks for c in shared} == {c.site.ranks for c in apart}


def test_a_gather_is_bound_by_its_cap_or_by_the_link(costs: ClassCosts) -> None:
    d = costs.draws
    gigabytes = costs.gathered_bytes / GB
    assert costs.gathered_bytes == 2 * 4 * GIB
    assert costs.gather_s(1) == pytest.approx(gigabytes / d["gather.gb_per_s_channel"])
    assert costs.gather_s(None) == pytest.approx(gigabytes / d["gather.gb_per_s_link"])
    assert costs.gather_s(64) == pytest.approx(costs.gather_s(None))
    assert costs.gather_s(1)[0] > costs.gather_s(4)[0] > costs.gather_s(None)[0]


def test_no_gather_without_anybody_to_gather_from(make_scenario: Any, draws: Draws) -> None:
    alone = costs_of(make_scenario(hardware={"gpu": "h200", "gpus_per_node": 1}, layout={"tp": 1}), draws)
    assert not alone.cls.communicators(Use.EXPORT)
    assert (alone.gather_s(None) == 0).all()
    assert not alone.live(NAMED_PLANS["reload"])


def test_most_of_a_pause_is_allocating_pinned_memory(costs: ClassCosts) -> None:
    none = SiteFactors.none(costs.draws)
    fresh, retained = (costs.pause_s(backup, none)[0] for backup in (Backup.REALLOCATE, Backup.RETAIN))
    assert 3.5 < fresh < 4.6  # 8 GiB per GPU: 3.6 to 4.1 s measured
    assert retained == pytest.approx(0.19, rel=0.15)
    assert costs.resume_s(Backup.RETAIN, none)[0] == pytest.approx(0.20, rel=0.15)
    assert costs.resume_s(Backup.REALLOCATE, none)[0] > costs.resume_s(Backup.RETAIN, none)[0]


def test_nodes_cost_memory_time_and_bandwidth(make_scenario: Any, draws: Draws) -> None:
    layout = {"tp": 4}
    near = costs_of(make_scenario(hardware={"gpu": "h200", "gpus_per_node": 4}, layout=layout), draws)
    far = costs_of(
        make_scenario(hardware={"gpu": "h200", "gpus_per_node": 2, "nodes": 2}, layout=layout), draws
    )
    a, b = (c.communicator(c.cls.communicators()[0], None) for c in (near, far))
    assert (b.bytes > a.bytes).all()
    assert (b.create_s > a.create_s).all()
    assert (far.gather_s(None) >= near.gather_s(None)).all()


def test_without_an_engine_nothing_is_handed_over(costs: ClassCosts) -> None:
    assert (costs.transfer_s() == 0).all()
    assert (costs.load_s(SiteFactors.none(costs.draws)) == 0).all()
