"""The closed form of process groups against Megatron-core itself: name, order, ranks and backend of each group."""

from __future__ import annotations

import math
import random
from dataclasses import asdict
from typing import Any

import pytest
from megatron_library import LIBRARIES, Library

from pitstop.errors import InvalidScenarioError
from pitstop.inventory import Topology, groups_of_rank

pytestmark = pytest.mark.megatron

LAYOUTS = 320
LARGEST_WORLD = 512
RANKS_COMPARED = 6
ORDERS = (
    "tp-cp-ep-dp-pp",
    "tp-cp-ep-dp-pp",
    "tp-cp-ep-pp-dp",
    "cp-tp-dp-ep-pp",
    "dp-tp-cp-ep-pp",
    "tp-dp-pp",
    "cp-ep-dp-pp",
)
Drawn = dict[str, Any]


def _draw(rng: random.Random, library: Library) -> Drawn:
    """Fields of a topology whose sizes fit, but which Megatron may still refuse for another reason."""
    while True:
        tp, pp = rng.choice((1, 1, 2, 3, 4, 8)), rng.choice((1, 1, 2, 3, 4))
        cp, ep = rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2, 4, 8))
        etp = rng.choice((None, None, 1, 2))
        with_gtp = library.has_gtp and rng.random() < 0.25
        gtp, egtp = (rng.choice((1, 2, 4)), rng.choice((1, 2))) if with_gtp else (1, 1)
        expert = (tp if etp is None else etp) * ep * pp * egtp
        world = math.lcm(tp * pp * cp * gtp, expert) * rng.choice((1, 1, 2, 3, 4, 6))
        if world <= LARGEST_WORLD:
            return {
                "world_size": world,
                "tp": tp,
                "pp": pp,
                "cp": cp,
                "ep": ep,
                "etp": etp,
                "order": rng.choice(ORDERS),
                "dist_opt_instances": rng.choice((1, 1, 1, 2, 3)),
                "gloo_groups": rng.random() < 0.5,
                "all_gather_group": rng.random() < 0.3 and not with_gtp,
                "gtp": gtp,
                "egtp": egtp,
            }


def _arguments(drawn: Drawn, library: Library) -> dict[str, Any]:
    """The same in the words of ``initialize_model_parallel``."""
    arguments = {
        "world_size": drawn["world_size"],
        "tensor_model_parallel_size": drawn["tp"],
        "pipeline_model_parallel_size": drawn["pp"],
        "context_parallel_size": drawn["cp"],
        "expert_model_parallel_size": drawn["ep"],
        "expert_tensor_parallel_size": drawn["etp"],
        "order": drawn["order"],
        "num_distributed_optimizer_instances": drawn["dist_opt_instances"],
        "create_gloo_process_groups": drawn["gloo_groups"],
    }
    if not library.has_gtp:
        return arguments | {"create_all_gather_group": drawn["all_gather_group"]}
    return arguments | {
        "gtp_remat_size": drawn["gtp"],
        "expert_gtp_remat_size": drawn["egtp"],
        "all_gather_groups": drawn["all_gather_group"],
    }


def _topology(drawn: Drawn, library: Library) -> Topology | None:
    try:
        return Topology(**drawn, megatron=library.version)
    except InvalidScenarioError:
        return None


def _draw_layouts(library: Library) -> list[Drawn]:
    """Layouts at random, ``LAYOUTS`` of them valid by our own rules; the others test that Megatron agrees."""
    rng, drawn, valid = random.Random(20), [], 0
    while valid < LAYOUTS:
        drawn.append(_draw(rng, library))
        valid += _topology(drawn[-1], library) is not None
    return drawn


@pytest.mark.parametrize("library", LIBRARIES)
def test_groups_equal_the_librarys(library: Library) -> None:
    drawn, rng = _draw_layouts(library), random.Random(21)
    answers = library.run("record_groups", (_arguments(fields, library) for fields in drawn))
    for fields, answer in zip(drawn, answers, strict=True):
        assert answer["version"] == library.version
        topology = _topology(fields, library)
        assert (topology is None) == ("refused" in answer), (fields, answer.get("refused"))
        if topology is None:
            continue
        for rank in rng.sample(range(topology.world_size), min(RANKS_COMPARED, topology.world_size)):
            theirs = [
                (name, backend, config, tuple(r))
                for name, backend, config, r in answer["groups"]
                if rank in r
            ]
            ours = [(g.name, g.backend, g.config_name, g.ranks) for g in groups_of_rank(topology, rank)]
            assert ours == theirs, (asdict(topology), rank)


@pytest.mark.parametrize("library", LIBRARIES)
def test_groups_equal_those_that_torch_made(library: Library) -> None:
    """Without the recorder: torch's own ``new_group``, over its fake backend."""
    fields = {"world_size": 32, "tp": 2, "pp": 2, "cp": 2, "ep": 4, "etp": 1}
    topology = Topology(**fields, gloo_groups=False, megatron=library.version)
    arguments = {
        "world_size": 32,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
    }
    ranks = (0, 13, 21)
    answers = library.run("record_groups", [arguments | {"rank": rank} for rank in ranks], "--real")
    for rank, answer in zip(ranks, answers, strict=True):
        theirs = [(name, tuple(members)) for name, _, _, members in answer["groups"]]
        assert [(g.name, g.ranks) for g in groups_of_rank(topology, rank)] == theirs
