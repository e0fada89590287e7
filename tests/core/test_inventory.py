"""Process groups in closed form: properties that hold for every layout, and facts known from measurements."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitstop.errors import InvalidScenarioError
from pitstop.inventory import (
    Backend,
    Group,
    StepOptions,
    Topology,
    Use,
    fold_sites,
    groups_of_rank,
    megatron_rules,
    rank_classes,
    shared_rank_sets,
    world_group,
)
from pitstop.models import MODEL_PRESETS, ModelShape, MoeShape
from pitstop.scenario import Scenario

LARGEST_WORLD = 64
MOE_MODEL = ModelShape(
    num_layers=12,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=24,
    num_query_groups=24,
    head_dim=8,
    vocab_size=1024,
    tied_embeddings=True,
    moe=MoeShape(num_experts=24, topk=2, ffn_hidden_size=96, first_dense_layers=4),
)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any topology of up to 64 ranks that Megatron accepts."""
    small = st.sampled_from((1, 1, 2, 3, 4))
    tp, pp, cp, ep = draw(small), draw(small), draw(small), draw(small)
    etp = draw(st.sampled_from((None, 1, 2)))
    unit = math.lcm(tp * pp * cp, (tp if etp is None else etp) * ep * pp)
    world = unit * draw(st.integers(1, max(1, LARGEST_WORLD // unit)))
    fields = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "etp": etp,
        "order": draw(st.sampled_from(("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "dp-cp-tp-ep-pp"))),
        "gloo_groups": draw(st.booleans()),
        "all_gather_group": draw(st.booleans()),
        "dist_opt_instances": draw(st.sampled_from((1, 1, 2, 3))),
        "megatron": draw(st.sampled_from(("0.16.1", "0.18.0", "0.19.2"))),
    }
    try:
        return Topology(world, **fields)
    except InvalidScenarioError:
        return Topology(world, **fields | {"order": "tp-cp-ep-dp-pp", "dist_opt_instances": 1})


def _scenario(layout: dict[str, Any], *, model: Any = MOE_MODEL, **hardware: Any) -> Scenario:
    return Scenario.model_validate(
        {
            "name": "inventory",
            "hardware": {"gpu": "h200", "gpus_per_node": 8} | hardware,
            "model": model,
            "layout": layout,
        }
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Scenarios of up to 64 ranks, some with several ranks on one GPU and nodes of unusual size."""
    tp, pp, cp, ep = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 3), (1, 2, 3), (1, 2), (1, 2, 4)))
    etp = draw(st.sampled_from((None, 1)))
    unit = math.lcm(tp * pp * cp, (tp if etp is None else etp) * ep * pp)
    world = unit * draw(st.integers(1, max(1, LARGEST_WORLD // unit)))
    nodes = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    per_node = world // nodes
    sharing = draw(st.sampled_from([n for n in range(1, min(per_node, 16) + 1) if per_node % n == 0]))
    if per_node // sharing > 72:
        sharing = per_node
    hardware = {"gpus_per_node": per_node // sharing, "nodes": nodes, "ranks_per_gpu": sharing}
    return _scenario({"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}, **hardware)


@given(topologies())
@settings(deadline=None, max_examples=60)
def test_groups_of_a_kind_partition_the_world(topology: Topology) -> None:
    everywhere = [groups_of_rank(topology, rank) for rank in range(topology.world_size)]
    by_name: dict[str, set[tuple[int, ...]]] = {}
    for rank, groups in enumerate(everywhere):
        assert len({g.name for g in groups}) == len(groups)
        for group in groups:
            assert rank in group.ranks
            assert list(group.ranks) == sorted(set(group.ranks))
            by_name.setdefault(group.name, set()).add(group.ranks)
    for name, sets in by_name.items():
        members = [rank for ranks in sets for rank in ranks]
        assert len(members) == len(set(members)), f"{name}: a rank is in two groups"
        if "EMBEDDING" not in name:
            assert len(members) == topology.world_size
    # Every member of a group knows the same group.
    for groups in everywhere:
        for group in groups:
            assert all(
                group.ranks in {g.ranks for g in everywhere[r] if g.name == group.name} for r in group.ranks
            )


@given(topologies())
@settings(deadline=None, max_examples=60)
def test_folding_loses_no_group_and_joins_equal_ranks_only(topology: Topology) -> None:
    groups = (world_group(topology), *groups_of_rank(topology, topology.world_size - 1))
    folded = shared_rank_sets(groups)
    assert sorted(name for c in folded for name in c.names) == sorted(g.name for g in groups)
    assert folded[0].names == ("default_pg",)
    keys = [(c.backend, c.ranks) for c in folded[1:]]
    assert len(keys) == len(set(keys))
    by_name = {g.name: g for g in groups}
    for communicator in folded:
        same = [by_name[name] for name in communicator.names]
        assert {(g.backend, g.ranks) for g in same} == {(communicator.backend, communicator.ranks)}
        assert communicator.hot == any(g.hot for g in same)
        assert communicator.uses == frozenset().union(*(g.uses for g in same))


def _signature(scenario: Scenario, rank: int, groups: tuple[Group, ...]) -> tuple[object, ...]:
    """What makes a rank's costs, worked out for it alone."""
    hardware = scenario.hardware

    def node(r: int) -> int:
        return r // hardware.ranks_per_node

    def gpu(r: int) -> tuple[int, int]:
        return node(r), (r % hardware.ranks_per_node) % hardware.gpus_per_node

    sites = tuple(
        (g.name, g.size, len({node(r) for r in g.ranks}), len({gpu(r) for r in g.ranks}), g.uses, g.hot)
        for g in groups
    )
    pipeline = next(g.ranks for g in groups if g.name == "PIPELINE_MODEL_PARALLEL_GROUP")
    stage = pipeline.index(rank)
    layers = scenario.layout.stage_layers(scenario.model.num_layers)
    moe = scenario.model.moe
    dense = moe.first_dense_layers if moe else scenario.model.num_layers
    start = sum(layers[:stage])
    leading = max(0, min(layers[stage], dense - start))
    shared = tuple(c.names for c in shared_rank_sets(groups))
    return (stage == 0, stage == len(layers) - 1, leading, layers[stage] - leading, sites, shared)


@given(scenarios())
@settings(deadline=None, max_examples=60)
def test_classes_agree_with_rank_by_rank_counting(scenario: Scenario) -> None:
    one_by_one = Counter(
        _signature(scenario, rank, groups_of_rank(scenario, rank)) for rank in range(scenario.world_size)
    )
    classes = rank_classes(scenario)
    assert sum(c.count for c in classes) == scenario.world_size
    assert [c.representative for c in classes] == sorted(c.representative for c in classes)
    found = {}
    for c in classes:
        groups = groups_of_rank(scenario, c.representative)
        signature = _signature(scenario, c.representative, groups)
        found[signature] = c.count
        assert [(s.names, s.ranks) for s in c.sites] == [((g.name,), g.ranks) for g in groups]
        sites = tuple((s.names[0], s.size, s.nodes, s.gpus, s.uses, s.hot) for s in c.sites)
        assert sites == signature[4]
        assert (c.stage.is_first, c.stage.is_last, c.stage.dense_layers, c.stage.moe_layers) == signature[:4]
    assert found == dict(one_by_one)


@pytest.mark.parametrize(
    ("topology", "options", "used", "there"),
    [
        (Topology(2, tp=2), StepOptions(), 2, 10),
        (Topology(4, tp=2), StepOptions(), 3, 13),
        (Topology(8, tp=2, cp=2, ep=4), StepOptions(moe=True), 8, 14),
    ],
)
def test_known_numbers_of_communicators(
    topology: Topology, options: StepOptions, used: int, there: int
) -> None:
    """Lazy creation against all at once, default group included, as counted on machines."""
    managed = [g for g in groups_of_rank(topology, 0, options=options) if g.is_managed]
    assert sum(Use.STEP in g.uses for g in managed) == used
    assert len(managed) + 1 == there


@pytest.mark.parametrize(
    ("topology", "distinct"),
    [(Topology(2, tp=2), 1), (Topology(4, tp=2), 3), (Topology(8, tp=4, cp=2, ep=8, etp=1), 3)],
)
def test_known_numbers_of_distinct_rank_sets(topology: Topology, distinct: int) -> None:
    managed = [g for g in groups_of_rank(topology, 0) if g.is_managed]
    assert len(shared_rank_sets(managed)) == distinct


def _used(groups: tuple[Group, ...], use: Use) -> set[str]:
    return {g.name for g in groups if use in g.uses}


def test_export_uses_what_gathers_and_hands_on_weights() -> None:
    dense = groups_of_rank(Topology(8, tp=2, pp=2), 0)
    assert _used(dense, Use.EXPORT) == {"TENSOR_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP"}
    moe = groups_of_rank(Topology(8, tp=2, ep=4), 0, options=StepOptions(moe=True))
    assert _used(moe, Use.EXPORT) == {
        "TENSOR_MODEL_PARALLEL_GROUP",
        "EXPERT_TENSOR_PARALLEL_GROUP",
        "EXPERT_MODEL_PARALLEL_GROUP",
    }
    assert not _used(groups_of_rank(Topology(4), 0), Use.EXPORT)


def test_cold_groups_are_used_but_carry_little() -> None:
    groups = groups_of_rank(Topology(4, tp=2, pp=2), 0, options=StepOptions(tied_embeddings=True))
    cold = {g.name for g in groups if Use.STEP in g.uses and not g.hot}
    assert cold == {"EMBEDDING_GROUP", "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"}
    assert all(Use.STEP in g.uses for g in groups if g.hot)


def test_a_stage_without_expert_layers_uses_no_expert_group() -> None:
    scenario = _scenario({"pp": 3, "ep": 2, "tp": 1}, gpus_per_node=6)
    first, middle = groups_of_rank(scenario, 0), groups_of_rank(scenario, 2)
    assert not any(g.name.startswith("EXPERT") and g.uses for g in first)
    assert "EXPERT_MODEL_PARALLEL_GROUP" in _used(middle, Use.STEP)
    assert [c.stage.moe_layers for c in rank_classes(scenario)] == [0, 4, 4]


def test_ranks_that_share_a_gpu_are_dealt_out_round_robin() -> None:
    """Two GPUs with two ranks each: ranks 0 and 2 are on the first GPU."""
    layout = {"tp": 2, "cp": 2}
    (only,) = rank_classes(_scenario(layout, gpus_per_node=2, ranks_per_gpu=2))
    sites = {site.names[0]: site for site in only.sites}
    assert sites["CONTEXT_PARALLEL_GROUP"].ranks == (0, 2)
    assert sites["CONTEXT_PARALLEL_GROUP"].same_gpu
    assert (sites["TENSOR_MODEL_PARALLEL_GROUP"].gpus, sites["TENSOR_MODEL_PARALLEL_GROUP"].nodes) == (2, 1)
    assert not sites["TENSOR_MODEL_PARALLEL_GROUP"].same_gpu
    assert (only.world.size, only.world.gpus, only.count) == (4, 2, 4)
    assert only.world.is_world


def test_a_class_lists_its_communicators_lazy_eager_and_shared() -> None:
    (only,) = rank_classes(_scenario({"tp": 2}, model="qwen3-4b", gpus_per_node=4))
    lazy, everything = only.communicators(Use.STEP), only.communicators()
    assert (len(lazy), len(everything)) == (3, 12)
    assert all(site.backend is Backend.NCCL and site.size > 1 for site in everything)
    shared = only.communicators(share=True)
    assert sum(len(site.names) for site in shared) == len(everything)
    assert len(shared) == 4  # as many as rank sets, and one for the experts, whose lane is another
    tensor = next(site for site in shared if "TENSOR_MODEL_PARALLEL_GROUP" in site.names)
    assert tensor.hot
    assert tensor.uses == {Use.STEP, Use.EXPORT}
    assert len(tensor.names) == len(tensor.config_names) > 1
    assert fold_sites((only.world, *everything))[0] == only.world


def test_groups_with_different_options_do_not_share() -> None:
    groups = [g for g in groups_of_rank(Topology(2, tp=2), 0) if g.is_managed]
    assert len(shared_rank_sets(groups, {"tp": {"max_ctas": 4}})) == 2
    assert len(shared_rank_sets(groups, {g.config_name or "": {"max_ctas": 4} for g in groups})) == 1


def test_gloo_and_all_gather_groups_are_optional() -> None:
    names = [g.name for g in groups_of_rank(Topology(4, gloo_groups=False), 0)]
    assert not any("GLOO" in name for name in names)
    with_gather = [g.name for g in groups_of_rank(Topology(4, ep=2, all_gather_group=True), 0)]
    assert with_gather[1] == "DATA_PARALLEL_GROUP_WITH_CP_AG"
    late = [g.name for g in groups_of_rank(Topology(4, ep=2, all_gather_group=True, megatron="0.18"), 0)]
    assert late[-2:] == ["DATA_PARALLEL_GROUP_WITH_CP_AG", "EXPERT_DATA_PARALLEL_GROUP_AG"]


@pytest.mark.parametrize(
    ("version", "rules", "noted"),
    [
        (None, "0.16", False),
        ("0.13.1", "0.16", False),
        ("0.16.1", "0.16", False),
        ("v0.17.0rc2", "0.16", False),
        ("0.18.0", "0.18", False),
        ("0.19.2+local", "0.19", False),
        ("0.12.3", "0.16", True),
        ("0.21.0", "0.19", True),
        ("1.0", "0.19", True),
    ],
)
def test_versions_have_rules(version: str | None, rules: str, noted: bool) -> None:
    found = megatron_rules(version)
    assert (found.version, found.note is not None) == (rules, noted)


@pytest.mark.parametrize("version", ["0.9.0", "core_r0.8.0", "", "newest", "0"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(InvalidScenarioError, match=r"versions\.megatron"):
        megatron_rules(version)


def test_a_version_may_be_given_apart_from_the_scenario() -> None:
    scenario = _scenario({"tp": 2}, model="qwen3-4b", gpus_per_node=2)
    names = [g.name for g in groups_of_rank(scenario, 0, "0.19.2")]
    assert names[0] == "GTP_WEIGHT_REMAT_GROUP"
    assert len(names) == len(groups_of_rank(scenario, 0)) + 3
    assert len(rank_classes(scenario, "0.19.2")[0].sites) == len(names)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"world_size": 3, "tp": 2}, r"layout\.world_size.*not divisible"),
        ({"world_size": 4, "ep": 3}, r"layout\.world_size.*etp x ep x pp"),
        ({"world_size": 4, "tp": 0}, r"layout\.tp: must be between 1"),
        ({"world_size": 4, "dist_opt_instances": 3}, r"layout\.dist_opt_instances"),
        ({"world_size": 4, "order": "tp-tp"}, r"layout\.order.*at most once"),
        ({"world_size": 4, "order": "tp-pp"}, r"layout\.order: leaves out dp"),
        (
            {"world_size": 8, "order": "tp-cp-ep-pp-dp", "pp": 2, "cp": 2},
            r"layout\.order: does not end in pp",
        ),
        ({"world_size": 4, "order": "dp-pp", "megatron": "0.19.2"}, r"layout\.order.*leaves out tp"),
        ({"world_size": 4, "gtp": 2}, r"layout\.megatron.*no generalized tensor parallelism"),
        (
            {"world_size": 8, "gtp": 2, "dist_opt_instances": 2, "megatron": "0.19.2"},
            r"dist_opt_instances.*must be 1",
        ),
        ({"world_size": 8, "gtp": 2, "all_gather_group": True, "megatron": "0.19.2"}, r"all_gather_group"),
    ],
)
def test_what_megatron_refuses_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidScenarioError, match=message):
        Topology(**fields)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(InvalidScenarioError, match="not a rank of a world of 4"):
        groups_of_rank(Topology(4), rank)


@pytest.mark.parametrize(("nodes", "tp", "world"), [(512, 8, 4096), (8192, 4, 65536)])
def test_large_worlds(nodes: int, tp: int, world: int) -> None:
    layout = {
        "tp": tp,
        "pp": 16,
        "cp": 4,
        "ep": 32,
        "etp": 1,
        "first_stage_layers": 5,
        "last_stage_layers": 5,
    }
    scenario = _scenario(layout, model=MODEL_PRESETS["qwen3-235b-a22b"], nodes=nodes)
    classes = rank_classes(scenario)
    assert scenario.world_size == sum(c.count for c in classes) == world
    assert [c.stage.layers for c in classes] == [5, 6, 5]
