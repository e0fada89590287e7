"""Which groups a training step uses: the closed form against recordings of real Megatron training on CPU.

One process per release trains all layouts, a few ranks each; every rank's recording is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from megatron_library import LIBRARIES, Library

from pitstop.inventory import StepOptions, Topology, Use, groups_of_rank

pytestmark = pytest.mark.megatron


@dataclass(frozen=True)
class Case:
    """A layout to train; ``options`` are fields of ``TrainOptions`` (see ``megatron_cpu.trainer``)."""

    name: str
    world_size: int
    options: dict[str, Any]
    managed: int | None = None
    """Known number of groups of more than one rank that a step uses on rank 0."""

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
    Case("experts-without-ep", 2, {"experts": 4}),
    Case("experts-without-ep-tp2-etp1", 4, {"tp": 2, "etp": 1, "experts": 4, **SP, **SHARDED}),
    Case("experts-without-ep-tp2-etp2", 2, {"tp": 2, "experts": 4, **SP, **SHARDED}),
    Case("experts-without-ep-two-instances", 4, {"experts": 4, "dist_opt_instances": 2, **SHARDED}),
    Case("two-instances", 4, {"dist_opt_instances": 2, **SHARDED}),
    Case(
        "two-instances-ep2",
        4,
        {"dist_opt_instances": 2, "ep": 2, "experts": 4, "per_token_loss": True, **SHARDED},
    ),
)
Recording = dict[str, Any]


@pytest.mark.parametrize("library", LIBRARIES)
def test_use_equals_recordings_of_training(library: Library) -> None:
    """One test for all cases, so that each release is started and each case is trained only once."""
    jobs = [{"world_size": case.world_size, "options": case.options} for case in CASES]
    differences = []
    for case, ranks in zip(CASES, library.run("step_use", jobs), strict=True):
        _check_that_it_trained(case, ranks)
        for rank, recording in enumerate(ranks):
            differences += [
                f"{case.name}, rank {rank}: {text}" for text in _differences(case, library, rank, recording)
            ]
    assert not differences, "\n".join(differences)


def _differences(case: Case, library: Library, rank: int, recording: Recording) -> list[str]:
    groups = groups_of_rank(case.topology(library), rank, options=case.step_options())
    listed = [(name, tuple(ranks)) for name, ranks in recording["groups"]]
    found = []
    if [(g.name, g.ranks) for g in groups] != listed[1:]:  # torch's list starts with the default group
        found.append(f"groups are {listed[1:]}")
    used = [g for g in groups if Use.STEP in g.uses]
    theirs = [listed[i][0] for i in recording["step"]]
    if [g.name for g in used] != theirs:
        found.append(f"a step used {theirs}, not {[g.name for g in used]}")
    if case.managed not in (None, sum(not g.is_single for g in used)):
        found.append(f"a step used other than {case.managed} groups of several ranks")
    if 0 not in recording["setup"] or 0 in recording["step"]:
        found.append("the default group is to be used while the optimizer is built, and by no step")
    return found


def _check_that_it_trained(case: Case, ranks: list[Recording]) -> None:
    """What was recorded is training that works: the loss falls from the first step to the next."""
    losses = [recording["losses"] for recording in ranks if recording["losses"][0] is not None]
    assert losses, case.name
    assert all(second < first for first, second in losses), (case.name, losses)
