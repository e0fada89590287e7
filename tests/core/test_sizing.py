"""Bytes per rank: published model sizes, known rates per parameter, and properties of sharding."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitstop.errors import InvalidScenarioError
from pitstop.models import MODEL_PRESETS, ModelShape, MoeShape
from pitstop.scenario import Scenario
from pitstop.sizing import padded_vocab_size, size_scenario, total_parameters

# Billions of parameters, from the models' cards.
PUBLISHED = {
    "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.7,
    "qwen3-4b": 4.0,
    "qwen3-8b": 8.2,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1,
}
SMALL = ModelShape(
    num_layers=8,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=8,
    num_query_groups=8,
    head_dim=16,
    vocab_size=1024,
    moe=MoeShape(num_experts=8, topk=2, ffn_hidden_size=48),
)


def _scenario(model: Any, ranks: int, layout: dict[str, Any] | None = None, **parts: Any) -> Scenario:
    return Scenario.model_validate(
        {
            "name": "sizing",
            "hardware": {"gpu": "h200", "gpus_per_node": 1, "nodes": ranks},
            "model": model,
            "layout": layout or {},
        }
        | parts
    )


def test_every_preset_has_its_published_size() -> None:
    assert {
        name: round(total_parameters(shape) / 1e9, 1) for name, shape in MODEL_PRESETS.items()
    } == PUBLISHED


def test_bytes_per_parameter() -> None:
    """bf16 weights 2, fp32 gradients 4, fp32 master copy and two moments 12 (shared by four ranks)."""
    sizing = size_scenario(_scenario("qwen3-4b", 4))
    heaviest = sizing.heaviest
    count = heaviest.parameters.total
    assert count == sizing.total_parameters
    assert (heaviest.weight_bytes, heaviest.gradient_bytes) == (2 * count, 4 * count)
    assert heaviest.optimizer_bytes == 3 * count
    assert sizing.saved_bytes == heaviest.saved_bytes == 9 * count
    assert sizing.export_bytes == 2 * count
    (only,) = sizing.classes
    assert (only.representative, only.count, only.each) == (0, 4, heaviest)


@pytest.mark.parametrize(
    ("optimizer", "weight", "gradient", "state"),
    [
        ({"distributed": False}, 2, 4, 12),
        ({"distributed": False, "grad_reduce_in_fp32": False}, 2, 2, 12),
        ({"distributed": False, "precision": "fp32"}, 4, 4, 8),
        ({"distributed": False, "name": "sgd"}, 2, 4, 8),
        ({"distributed": False, "cpu_offload": True}, 2, 4, 0),
        ({"distributed": True, "cpu_offload": True}, 2, 4, 0),
        ({"distributed": True}, 2, 4, 6),
    ],
)
def test_optimizer_options(optimizer: dict[str, Any], weight: int, gradient: int, state: int) -> None:
    each = size_scenario(_scenario("qwen3-0.6b", 2, optimizer=optimizer)).heaviest
    count = each.parameters.total
    assert each.weight_bytes == weight * count
    assert each.gradient_bytes == gradient * count
    assert each.optimizer_bytes == state * count


def test_instances_of_the_distributed_optimizer_hold_the_state_twice() -> None:
    one = size_scenario(_scenario("qwen3-0.6b", 4)).heaviest
    two = size_scenario(_scenario("qwen3-0.6b", 4, {"dist_opt_instances": 2})).heaviest
    assert two.optimizer_bytes == 2 * one.optimizer_bytes


def test_expert_state_is_sharded_over_expert_data_parallel_ranks() -> None:
    each = size_scenario(_scenario(SMALL, 8, {"tp": 2, "ep": 4, "etp": 1})).heaviest
    assert each.optimizer_bytes == 12 * (each.parameters.dense // 4 + each.parameters.expert // 2)


def test_experts_without_expert_parallelism_are_sharded_like_the_rest_before_0_19() -> None:
    layout = {"tp": 2, "etp": 1}
    old = size_scenario(_scenario(SMALL, 8, layout, versions={"megatron": "0.16.1"})).heaviest
    new = size_scenario(_scenario(SMALL, 8, layout, versions={"megatron": "0.19.2"})).heaviest
    assert old.optimizer_bytes == 12 * (old.parameters.dense // 4 + old.parameters.expert // 4)
    assert new.optimizer_bytes == 12 * (new.parameters.dense // 4 + new.parameters.expert // 8)


def test_a_tied_embedding_is_on_both_ends_of_a_pipeline() -> None:
    tied = SMALL.model_copy(update={"tied_embeddings": True, "moe": None})
    table = 1024 * 64
    whole = size_scenario(_scenario(tied, 1)).heaviest.parameters.total
    halves = size_scenario(_scenario(tied, 2, {"pp": 2})).classes
    assert sum(half.each.parameters.total for half in halves) == whole + table


def test_the_heaviest_rank_is_the_one_with_most_to_save() -> None:
    layout = {"pp": 2, "first_stage_layers": 6, "last_stage_layers": 2}
    sizing = size_scenario(_scenario(SMALL, 2, layout))
    assert sizing.heaviest == sizing.classes[0].each
    assert sizing.saved_bytes == max(c.each.saved_bytes for c in sizing.classes)


def test_a_scenarios_own_figures_are_used() -> None:
    trainer = {"saved_bytes_per_rank": 7, "export_bytes_per_rank": 5}
    sizing = size_scenario(_scenario("qwen3-4b", 1, trainer=trainer))
    assert (sizing.saved_bytes, sizing.export_bytes) == (7, 5)
    assert sizing.heaviest.saved_bytes > 7


@given(st.integers(1, 1_000_000), st.integers(1, 64), st.sampled_from((1, 128)))
def test_vocabulary_is_padded_to_the_next_multiple(vocab: int, tp: int, multiple: int) -> None:
    padded = padded_vocab_size(vocab, tp, multiple)
    assert padded % (multiple * tp) == 0
    assert 0 <= padded - vocab < multiple * tp


def test_vocabulary_padding_can_be_switched_off() -> None:
    odd = SMALL.model_copy(update={"vocab_size": 1000})
    padded = size_scenario(_scenario(odd, 2, {"tp": 2})).heaviest.parameters.total
    exact = size_scenario(_scenario(odd, 2, {"tp": 2}), vocab_multiple=1).heaviest.parameters.total
    assert padded - exact == 2 * (1024 - 1000) // 2 * 64


@given(st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4)))
def test_shards_add_up_to_the_model(tp: int, pp: int, ep: int) -> None:
    """Norms and routers are on every tensor-parallel rank; all else is on exactly one."""
    ranks = tp * pp * ep
    sizing = size_scenario(_scenario(SMALL, ranks, {"tp": tp, "pp": pp, "ep": ep}))
    assert sum(c.count for c in sizing.classes) == ranks
    dense = sum(c.count * c.each.parameters.dense for c in sizing.classes) // ep
    expert = sum(c.count * c.each.parameters.expert for c in sizing.classes)
    replicated = SMALL.num_layers * (2 * 64 + 8 * 64) + 64
    assert dense + expert == sizing.total_parameters + (tp - 1) * replicated


def test_shapes_that_cannot_be_split_are_refused() -> None:
    odd = SMALL.model_copy(update={"moe": None, "ffn_hidden_size": 97})
    with pytest.raises(InvalidScenarioError, match=r"model\.ffn_hidden_size: cannot be split over 2 ranks"):
        size_scenario(_scenario(odd, 2, {"tp": 2}))
