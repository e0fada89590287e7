"""Parameter counts against Megatron-core's own ``GPTModel``, small models and full-size presets."""

from __future__ import annotations

from typing import Any

import pytest
from megatron_library import INSTALLED, LIBRARIES, Library

from pitstop.inventory import stages_of
from pitstop.models import MODEL_PRESETS, ModelShape, MoeShape
from pitstop.scenario import Scenario
from pitstop.sizing import RankBytes, padded_vocab_size, rank_bytes, stage_parameters, total_parameters

pytestmark = pytest.mark.megatron

SMALL = ModelShape(
    num_layers=6,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=8,
    num_query_groups=2,
    head_dim=16,
    vocab_size=1000,
)
MOE = MoeShape(num_experts=8, topk=2, ffn_hidden_size=48)


def _small(**fields: Any) -> ModelShape:
    return SMALL.model_copy(update=fields)


CASES: list[tuple[str, ModelShape | str, int, dict[str, Any]]] = [
    ("plain", SMALL, 1, {}),
    ("tp2", SMALL, 2, {"tp": 2}),
    ("tp4-above-kv-heads", SMALL, 4, {"tp": 4}),
    ("qk-layernorm", _small(qk_layernorm=True), 2, {"tp": 2}),
    ("tied-one-stage", _small(tied_embeddings=True), 2, {"tp": 2}),
    ("tied-pp3", _small(tied_embeddings=True), 6, {"tp": 2, "pp": 3}),
    ("untied-uneven-pp", SMALL, 3, {"pp": 3, "first_stage_layers": 1, "last_stage_layers": 2}),
    ("biases", _small(add_bias=True), 2, {"tp": 2}),
    ("qkv-bias", _small(add_qkv_bias=True), 2, {"tp": 2}),
    ("no-gate", _small(gated_mlp=False), 2, {"tp": 2}),
    ("moe-ep4", _small(moe=MOE), 4, {"ep": 4}),
    ("moe-tp2-etp1", _small(moe=MOE), 4, {"tp": 2, "ep": 4, "etp": 1}),
    ("moe-tp2-etp2-pp2", _small(moe=MOE, tied_embeddings=True), 8, {"tp": 2, "ep": 2, "pp": 2}),
    (
        "moe-leading-dense-shared-expert",
        _small(moe=MOE.model_copy(update={"first_dense_layers": 2, "shared_ffn_hidden_size": 32})),
        6,
        {"tp": 2, "ep": 2, "etp": 1, "pp": 3},
    ),
    *((name, name, 1, {}) for name, shape in MODEL_PRESETS.items() if shape.moe is None),
    ("qwen3-32b-tp8-pp2", "qwen3-32b", 16, {"tp": 8, "pp": 2}),
    ("qwen3-30b-a3b-tp2-ep8", "qwen3-30b-a3b", 8, {"tp": 2, "ep": 8, "etp": 1}),
    (
        "qwen3-235b-a22b-tp4-pp4-ep16",
        "qwen3-235b-a22b",
        64,
        {"tp": 4, "pp": 4, "ep": 16, "etp": 1, "first_stage_layers": 23, "last_stage_layers": 23},
    ),
]


def _scenario(
    model: ModelShape | str, world_size: int, layout: dict[str, Any], optimizer: dict[str, Any] | None = None
) -> Scenario:
    return Scenario.model_validate(
        {
            "name": "sizing",
            "hardware": {"gpu": "h200", "gpus_per_node": 1, "nodes": world_size},
            "model": model,
            "layout": layout,
            "optimizer": optimizer or {},
        }
    )


def _job(scenario: Scenario, rank: int) -> dict[str, Any]:
    """The scenario's model in the words of Megatron."""
    model, layout = scenario.model, scenario.layout
    config: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.head_dim,
        "qk_layernorm": model.qk_layernorm,
        "gated_linear_unit": model.gated_mlp,
        "add_bias_linear": model.add_bias,
        "add_qkv_bias": model.add_qkv_bias,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
    }
    if model.moe is not None:
        config |= {
            "num_moe_experts": model.moe.num_experts,
            "moe_router_topk": model.moe.topk,
            "moe_ffn_hidden_size": model.moe.ffn_hidden_size,
            "moe_layer_freq": [int(i >= model.moe.first_dense_layers) for i in range(model.num_layers)],
        }
        if model.moe.shared_ffn_hidden_size:
            config["moe_shared_expert_intermediate_size"] = model.moe.shared_ffn_hidden_size
    return {
        "world_size": scenario.world_size,
        "rank": rank,
        "parallel": {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.expert_tp,
        },
        "config": config,
        "vocab_size": padded_vocab_size(model.vocab_size, layout.tp),
        "tied": model.tied_embeddings,
    }


def _whole_models() -> list[ModelShape]:
    """Models whose vocabulary is a multiple of 128, so that padding does not blur the count of the whole model."""
    return [
        _small(vocab_size=1024, tied_embeddings=tied, moe=moe, qk_layernorm=True)
        for tied in (True, False)
        for moe in (None, MOE)
    ]


@pytest.mark.parametrize("library", LIBRARIES)
def test_parameters_equal_those_of_the_librarys_models(library: Library) -> None:
    """The last rank of each stage, in each case; then whole models on one rank. One process for all of them."""
    jobs, expected = [], []
    for name, model, world_size, layout in CASES:
        scenario = _scenario(model, world_size, layout)
        for index, stage in enumerate(stages_of(scenario)):
            rank = (index + 1) * world_size // scenario.layout.pp - 1
            jobs.append(_job(scenario, rank))
            ours = stage_parameters(scenario, stage)
            expected.append((name, index, ours.dense, ours.expert))
    jobs += [_job(_scenario(model, 1, {}), 0) for model in _whole_models()]
    answers = library.run("count_parameters", jobs)
    counted = [(*which[:2], a["dense"], a["expert"]) for which, a in zip(expected, answers, strict=False)]
    assert expected == counted
    whole = [a["dense"] + a["expert"] for a in answers[len(expected) :]]
    assert whole == [total_parameters(model) for model in _whole_models()]


TRAINED = ModelShape(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=128,
    num_attention_heads=4,
    num_query_groups=4,
    head_dim=8,
    vocab_size=64,
    tied_embeddings=True,
)
TRAINED_MOE = TRAINED.model_copy(update={"moe": MoeShape(num_experts=4, topk=2, ffn_hidden_size=64)})
HELD: list[tuple[ModelShape, int, dict[str, Any], bool, str]] = [
    # model, ranks, layout, distributed optimizer, precision
    (TRAINED, 4, {"tp": 2}, True, "bf16"),
    (TRAINED, 2, {}, False, "bf16"),
    (TRAINED, 2, {"pp": 2}, False, "fp32"),
    (TRAINED, 4, {"dist_opt_instances": 2}, True, "fp32"),
    (TRAINED_MOE, 4, {"ep": 2}, True, "bf16"),
]


@pytest.mark.parametrize("library", [INSTALLED])
def test_bytes_equal_those_that_a_trainer_holds(library: Library) -> None:
    """Weights, gradient buffers and optimizer state after two steps; padding inside the buffers comes on top."""
    jobs = [
        {
            "world_size": world_size,
            "options": layout
            | {
                "experts": model.moe.num_experts if model.moe else 0,
                "distributed_optimizer": distributed,
                "bf16": precision == "bf16",
            },
        }
        for model, world_size, layout, distributed, precision in HELD
    ]
    recordings = library.run("step_use", jobs)
    for (model, world_size, layout, distributed, precision), ranks in zip(HELD, recordings, strict=True):
        optimizer = {"distributed": distributed, "precision": precision}
        scenario = _scenario(model, world_size, layout, optimizer)
        expected = [_bytes_of_rank(scenario, rank) for rank in range(world_size)]
        held = [recording["bytes"] for recording in ranks]
        assert [h["weight"] for h in held] == [e.weight_bytes for e in expected]
        for h, e in zip(held, expected, strict=True):
            assert e.gradient_bytes <= h["gradient"] <= 1.1 * e.gradient_bytes
        # Padding makes the shards of so small a model unequal; in all they hold what we count.
        total = sum(e.optimizer_bytes for e in expected)
        assert sum(h["optimizer"] for h in held) == pytest.approx(total, rel=1e-3)


def _bytes_of_rank(scenario: Scenario, rank: int) -> RankBytes:
    stage = stages_of(scenario)[rank * scenario.layout.pp // scenario.world_size]
    return rank_bytes(scenario, stage, vocab_multiple=1)
