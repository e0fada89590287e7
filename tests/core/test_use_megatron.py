"""Which groups a training step uses: the closed form against recordings of real Megatron training on CPU.

One process per release trains all layouts, a few ranks each; every rank's recording is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from megatron_library import LIBRARIES, Library

from pitstop.inventory import Group, StepOptions, Topology, Use, groups_of_rank

pytestmark = pytest.mark.megatron


@dataclass(frozen=True)
class Case:
    """A layout to train; ``options`` are fields of ``TrainOptions`` (see ``megatron_cpu.trainer``)."""

    name: str
    world_size: int
    options: dict[str, Any]
    managed: int | None = None
    """Known number of groups of more than one rank that a step uses on rank 0."""
    also: dict[str, Any] = field(default_factory=dict)

    def topology(self, library: Library) -> Topology:
        names = ("tp", "pp", "cp", "ep", "etp", "order", "dist_opt_instances", "gloo_groups")
        given = {name: self.options[name] for name in names if name in self.options}
        return Topology(self.world_size, **{"gloo_groups": False} | given, megatron=library.version)

    def step_options(self) -> StepOptions:
        o = self.options
        return StepOptions(
            moe=o.get("experts", 0) > 0,
            distributed_optimizer=o.get("distributed_optimizer", False),
            tied_embeddings=o.get("tied", True),
            dispatcher=o.get("dispatcher", "alltoall"),
            aux_loss=o.get("aux_loss", True),
            per_token_loss=o.get("per_token_loss", False),
        )


SHARDED = {"distributed_optimizer": True}
SP = {"sequence_parallel": True}
CASES = (
    Case("tp2", 2, {"tp": 2}, managed=2),
    Case("tp2-dp2-sharded-sp", 4, {"tp": 2, **SHARDED, **SP}, managed=3),
    Case(
        "tp2-dp2-sharded-overlap-bf16-gloo",
        4,
        {"tp": 2, **SHARDED, "overlap": True, "bf16": True, "gloo_groups": True},
    ),
    Case("tp2-pp2-tied", 4, {"tp": 2, "pp": 2}, managed=4),
    Case("pp2-untied", 2, {"pp": 2, "tied": False}, managed=2),
    Case("pp2-per-token-loss", 4, {"pp": 2, "per_token_loss": True, **SHARDED}),
    Case("cp2", 2, {"cp": 2}, managed=2),
    Case("cp2-per-token-loss", 2, {"cp": 2, "per_token_loss": True}),
    Case("ep4", 4, {"ep": 4, "experts": 4}, managed=4),
    Case("ep4-sharded-no-aux-loss", 4, {"ep": 4, "experts": 4, "aux_loss": False, **SHARDED}),
    Case("ep2-allgather", 4, {"tp": 2, "ep": 2, "experts": 4, "dispatcher": "allgather", **SP, **SHARDED}),
    Case("tp2-ep2-etp2", 4, {"tp": 2, "ep": 2, "experts": 4, **SP, **SHARDED}),
    Case("tp2-cp2-ep4", 8, {"tp": 2, "cp": 2, "ep": 4, "experts": 4, **SP, **SHARDED}, managed=8),
    Case("pp2-ep2", 4, {"pp": 2, "ep": 2, "experts": 4}),
    Case("two-instances", 4, {"dist_opt_instances": 2, **SHARDED}),
    Case(
        "two-instances-ep2",
        4,
        {"dist_opt_instances": 2, "ep": 2, "experts": 4, "per_token_loss": True, **SHARDED},
    ),
)
Recording = dict[str, Any]


@pytest.fixture(scope="module", params=LIBRARIES)
def recorded(request: pytest.FixtureRequest) -> tuple[Library, dict[str, list[Recording]]]:
    """Recordings of all cases, by name, then by rank."""
    library: Library = request.param
    jobs = [{"world_size": case.world_size, "options": case.options} for case in CASES]
    answers = library.run("step_use", jobs)
    return library, {case.name: answer for case, answer in zip(CASES, answers, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_step_uses_these_groups(recorded: tuple[Library, dict[str, list[Recording]]], case: Case) -> None:
    library, recordings = recorded
    for rank, recording in enumerate(recordings[case.name]):
        groups = groups_of_rank(case.topology(library), rank, options=case.step_options())
        listed = [(name, tuple(ranks)) for name, ranks in recording["groups"]]
        assert [(g.name, g.ranks) for g in groups] == listed[1:], "torch's list starts with the default group"
        assert _names(groups, Use.STEP) == [listed[i][0] for i in recording["step"]]
    rank_0 = groups_of_rank(case.topology(library), 0, options=case.step_options())
    used = [g for g in rank_0 if Use.STEP in g.uses and not g.is_single]
    assert case.managed in (None, len(used))


def test_training_learns_and_is_the_same_in_all_releases(
    recorded: tuple[Library, dict[str, list[Recording]]],
) -> None:
    """The recordings are of training that works: the loss falls, and all ranks of a stage see the same one."""
    _, recordings = recorded
    for name, ranks in recordings.items():
        losses = [recording["losses"] for recording in ranks if recording["losses"][0] is not None]
        assert losses, name
        assert all(last < first for first, last in losses), name


def test_building_the_optimizer_uses_the_default_group(
    recorded: tuple[Library, dict[str, list[Recording]]],
) -> None:
    _, recordings = recorded
    for ranks in recordings.values():
        assert all(0 in recording["setup"] and 0 not in recording["step"] for recording in ranks)


def _names(groups: tuple[Group, ...], use: Use) -> list[str]:
    return [group.name for group in groups if use in group.uses]
