"""``pitstop nccl-config``: the file, and what Megatron-core itself makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from megatron_library import LIBRARIES, Library

from pitstop.cli.app import build_app, run
from pitstop.cli.nccl_config import nccl_config
from pitstop.errors import InvalidPlanError
from pitstop.inventory import groups_of_rank
from pitstop.inventory.caps import channel_caps
from pitstop.inventory.lanes import is_bulk
from pitstop.loading import load_scenario
from pitstop.plan import NAMED_PLANS, Disposition, Plan
from pitstop.scenario import Layout, Scenario, Versions

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
LEAN = NAMED_PLANS["lean"]
H20 = next(path for path in EXAMPLES if path.stem == "relax-8xh20-qwen3-30b-a3b")


def scenario_of(path: Path, megatron: str | None = None, **layout: Any) -> Scenario:
    scenario = load_scenario(path)
    given = scenario.layout.model_dump(exclude_defaults=True) | layout
    versions = Versions(megatron=megatron or scenario.versions.megatron)
    return scenario.model_copy(update={"layout": Layout(**given), "versions": versions})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_cold_groups_are_capped_and_others_are_not(path: Path) -> None:
    scenario = load_scenario(path)
    caps = channel_caps(scenario, LEAN)
    assert set(caps.values()) == {LEAN.cold_max_ctas}
    for group in groups_of_rank(scenario, 0):
        if group.config_name is not None:
            assert (group.config_name in caps) != is_bulk(group.name), group.name
        if group.hot:
            assert group.config_name not in caps, f"{group.name} carries the bulk of a step"


def test_the_file_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app, ["nccl-config", str(H20)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "plan lean for scenario relax-8xh20-qwen3-30b-a3b" in out
    assert yaml.safe_load(out) == {
        name: {"max_ctas": 4, "min_ctas": 1} for name in channel_caps(load_scenario(H20), LEAN)
    }
    assert max(map(len, out.splitlines())) <= 120


def test_both_caps_of_a_plan_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ntraining: keep\ncold_max_ctas: 2\nhot_max_ctas: 16\ncanary: true\n")
    assert run(build_app, ["nccl-config", str(H20), "--plan", str(path)]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["tp"] == {"max_ctas": 16, "min_ctas": 1}
    assert found["mp"] == {"max_ctas": 2, "min_ctas": 1}
    assert set(found) == {g.config_name for g in groups_of_rank(load_scenario(H20), 0) if g.config_name}


@pytest.mark.parametrize("plan", ["reload", "keep"])
def test_a_plan_without_caps_is_refused(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app, ["nccl-config", str(H20), "--plan", plan]) == 2
    out, err = capsys.readouterr()
    assert out == "", "Megatron cannot read a file that holds nothing"
    assert f"plan {plan} caps no communicator" in err
    assert "without nccl_communicator_config_path" in err


def test_a_cap_on_hot_groups_alone() -> None:
    plan = Plan(name="mine", training=Disposition.KEEP, hot_max_ctas=8)
    assert yaml.safe_load(nccl_config(load_scenario(H20), plan))["dp_cp"]["max_ctas"] == 8
    with pytest.raises(InvalidPlanError):
        nccl_config(load_scenario(H20), NAMED_PLANS["suspend"])


@pytest.mark.megatron
@pytest.mark.parametrize("library", LIBRARIES)
def test_megatron_reads_every_entry(library: Library) -> None:
    """Read by Megatron's own code: each name of the file is one that it looks for, and its caps reach NCCL."""
    scenarios = [
        scenario_of(H20, library.version),
        scenario_of(H20, library.version, tp=2, cp=1, ep=2, etp=2, dist_opt_instances=2),
        *(scenario_of(path, library.version) for path in EXAMPLES if load_scenario(path).world_size <= 64),
    ]
    jobs = [_arguments(scenario) | {"text": nccl_config(scenario, LEAN)} for scenario in scenarios]
    for scenario, answer in zip(scenarios, library.run("nccl_caps", jobs), strict=True):
        assert answer["version"] == library.version
        caps = channel_caps(scenario, LEAN)
        expected = {
            name: {"max_ctas": caps[name], "min_ctas": 1} if name in caps else None
            for name in answer["asked"]
        }
        assert answer["asked"] == expected
        assert set(caps) <= set(answer["asked"]), "a name that Megatron never looks for would cap nothing"
        for description, name in answer["groups"].items():
            assert (name in caps) != is_bulk(description), description


def _arguments(scenario: Scenario) -> dict[str, Any]:
    layout = scenario.layout
    return {
        "world_size": scenario.world_size,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "num_distributed_optimizer_instances": layout.dist_opt_instances,
        "create_gloo_process_groups": False,
    }
