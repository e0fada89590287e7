"""Scenarios: derived sizes, defaults, presets, immutability, and the shipped examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pitstop.loading import digest, load_scenario, validate
from pitstop.models import MODEL_PRESETS
from pitstop.scenario import Scenario

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.yaml"))


def scenario(**changes: Any) -> Scenario:
    document = {"name": "s", "hardware": {"gpu": "h200", "gpus_per_node": 8}, "model": "qwen3-4b", **changes}
    return validate(Scenario, document, "scenario")


def test_sizes_are_derived() -> None:
    made = scenario(
        hardware={"gpu": "h200", "gpus_per_node": 8, "nodes": 4, "ranks_per_gpu": 2},
        layout={"tp": 4, "pp": 2, "cp": 2, "ep": 8, "etp": 1},
        model="qwen3-30b-a3b",
    )
    assert made.world_size == 64
    assert made.hardware.ranks_per_node == 16
    assert made.dp == 4
    assert made.expert_dp == 4
    assert made.layout.expert_tp == 1


def test_expert_tensor_parallelism_defaults_to_tp() -> None:
    assert scenario(layout={"tp": 4}).layout.expert_tp == 4


@pytest.mark.parametrize("gpu", ["H200", "NVIDIA-H200", "nvidia h200", " h200 "])
def test_gpu_names_are_normalised(gpu: str) -> None:
    assert scenario(hardware={"gpu": gpu, "gpus_per_node": 2}).hardware.gpu == "h200"


@pytest.mark.parametrize("name", sorted(MODEL_PRESETS))
def test_every_preset_makes_a_scenario(name: str) -> None:
    assert scenario(model=name).model == MODEL_PRESETS[name]


def test_a_scenario_is_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        scenario().name = "other"


def test_the_digest_ignores_how_the_document_was_written() -> None:
    plain = scenario()
    assert digest(plain) == digest(scenario(layout={"tp": 1}, description=""))
    assert digest(plain) == digest(Scenario.model_validate_json(plain.model_dump_json()))
    assert digest(plain) != digest(scenario(layout={"tp": 2}))


@pytest.mark.parametrize(
    ("layers", "layout", "expected"),
    [
        (36, {"pp": 1}, (36,)),
        (36, {"pp": 4}, (9, 9, 9, 9)),
        (36, {"pp": 4, "first_stage_layers": 8, "last_stage_layers": 8}, (8, 10, 10, 8)),
        (94, {"pp": 4, "first_stage_layers": 22}, (22, 24, 24, 24)),
    ],
)
def test_layers_per_stage(layers: int, layout: dict[str, int], expected: tuple[int, ...]) -> None:
    made = scenario(model={**MODEL_PRESETS["qwen3-4b"].model_dump(), "num_layers": layers}, layout=layout)
    assert made.layout.stage_layers(layers) == expected


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_load_and_round_trip(path: Path) -> None:
    loaded = load_scenario(path)
    assert Scenario.model_validate_json(loaded.model_dump_json()) == loaded


def test_the_examples_of_the_house_are_there() -> None:
    assert {
        "relax-4xa6000-qwen3-4b", "relax-8xh20-qwen3-30b-a3b", "h200x2-tp2", "h200x64-qwen3-235b-a22b",
        "h200x4096-qwen3-235b-a22b",
    } <= {path.stem for path in EXAMPLES}  # fmt: skip
