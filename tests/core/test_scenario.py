"""Scenarios: derived sizes, defaults, and the splitting of layers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pitstop.hardware import GPUS, Link
from pitstop.models import MODEL_PRESETS
from pitstop.scenario import Hardware, Layout, Scenario


def scenario(**changes: Any) -> Scenario:
    document = {
        "name": "test",
        "hardware": {"gpu": "h200", "gpus_per_node": 8, "nodes": 8},
        "layout": {"tp": 4, "pp": 2, "cp": 2, "ep": 16, "etp": 1},
        "model": "qwen3-235b-a22b",
    }
    return Scenario.model_validate(document | changes)


def test_derived_sizes() -> None:
    s = scenario()
    assert (s.world_size, s.dp, s.expert_dp) == (64, 4, 2)
    assert s.layout.expert_tp == 1
    assert s.hardware.ranks_per_node == 8


def test_several_ranks_per_gpu() -> None:
    s = scenario(hardware={"gpu": "h200", "gpus_per_node": 2, "ranks_per_gpu": 4}, layout={"tp": 4, "etp": 1})
    assert (s.world_size, s.hardware.ranks_per_node, s.dp, s.expert_dp) == (8, 8, 2, 8)


def test_expert_tp_follows_tp_as_in_megatron() -> None:
    assert Layout(tp=4).expert_tp == 4
    assert Layout(tp=4, etp=1).expert_tp == 1


def test_a_preset_is_the_same_as_its_shape() -> None:
    shape = MODEL_PRESETS["qwen3-235b-a22b"]
    assert scenario(model=shape.model_dump()) == scenario()


@pytest.mark.parametrize("name", ["H200", " h200 ", "NVIDIA H200", "nvidia_h200"])
def test_gpu_names_are_read_leniently(name: str) -> None:
    assert Hardware(gpu=name, gpus_per_node=1).gpu == "h200"


def test_the_link_is_the_models_own_unless_given() -> None:
    assert Hardware(gpu="rtx-a6000", gpus_per_node=4).intra_node_link is Link.NVLINK_BRIDGE
    assert Hardware(gpu="rtx-a6000", gpus_per_node=4, link=Link.PCIE).intra_node_link is Link.PCIE


def test_every_gpu_of_the_catalogue_can_be_named() -> None:
    for name, model in GPUS.items():
        assert Hardware(gpu=name, gpus_per_node=1).model is model
        assert model.memory_bytes > 0


@pytest.mark.parametrize(
    ("layout", "layers", "stages"),
    [
        ({}, 36, (36,)),
        ({"pp": 4}, 36, (9, 9, 9, 9)),
        ({"pp": 4, "first_stage_layers": 4, "last_stage_layers": 6}, 30, (4, 10, 10, 6)),
        ({"pp": 2, "first_stage_layers": 10}, 36, (10, 26)),
        ({"pp": 2, "first_stage_layers": 10, "last_stage_layers": 26}, 36, (10, 26)),
    ],
)
def test_layers_per_stage(layout: dict[str, int], layers: int, stages: tuple[int, ...]) -> None:
    assert Layout(**layout).stage_layers(layers) == stages  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        ({"pp": 5}, 36),
        ({"pp": 2, "first_stage_layers": 37}, 36),
        ({"pp": 2, "first_stage_layers": 36}, 36),  # the last stage would be empty
        ({"pp": 2, "first_stage_layers": 10, "last_stage_layers": 25}, 36),
        ({"pp": 64}, 36),
    ],
)
def test_layers_that_cannot_be_split(layout: dict[str, int], layers: int) -> None:
    with pytest.raises(ValueError, match=r"^layout\.pp: .* cannot be split"):
        Layout(**layout).stage_layers(layers)  # type: ignore[arg-type]


def test_scenarios_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        scenario().name = "other"  # type: ignore[misc]


def test_scenarios_survive_json() -> None:
    s = scenario(versions={"nccl": "2.30.7"})
    assert Scenario.model_validate_json(s.model_dump_json()) == s


def test_the_schema_describes_every_field_a_user_writes() -> None:
    schema = Scenario.model_json_schema()
    for name in ("Hardware", "Layout", "Trainer", "Engine", "Optimizer"):
        for field, text in schema["$defs"][name]["properties"].items():
            assert text.get("description"), f"{name}.{field}"
