"""``pitstop nccl-config``: a plan's channel caps as the file that Megatron-core reads."""

from __future__ import annotations

from typing import Annotated

import typer

from pitstop.cli.gates import find_plan
from pitstop.cli.options import ScenarioArgument
from pitstop.errors import FieldProblem, InvalidPlanError
from pitstop.loading import load_scenario
from pitstop.plan import Plan
from pitstop.scenario import Scenario


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("nccl-config")(nccl_config_command)


def nccl_config_command(
    scenario: ScenarioArgument,
    plan: Annotated[
        str,
        typer.Option(metavar="NAME|FILE", help="Plan whose caps to write: a named one, or one in a file."),
    ] = "lean",
) -> None:
    """Print a plan's channel caps as YAML for Megatron's nccl_communicator_config_path."""
    print(nccl_config(load_scenario(scenario), find_plan(plan)))


def nccl_config(scenario: Scenario, plan: Plan) -> str:
    """The file's text.

    Raises:
        InvalidPlanError: the plan caps nothing.
        InvalidScenarioError: Megatron would refuse the layout.
    """
    from pitstop.inventory.caps import channel_caps  # noqa: PLC0415 - numpy costs start-up time

    caps = channel_caps(scenario, plan)
    if not caps:
        problem = FieldProblem(
            "cold_max_ctas",
            "nothing",
            f"plan {plan.name} caps no communicator",
            "Start Megatron without nccl_communicator_config_path, or use a plan with a cap, such as lean.",
        )
        raise InvalidPlanError("nothing to write", [problem])
    lines = [
        f"# Channel caps of plan {plan.name} for scenario {scenario.name}, as megatron-core reads them from",
        "# nccl_communicator_config_path. Leave the file out where Pitstop manages the groups: it caps them itself,",
        "# and groups with options of their own cannot share a communicator.",
        *(f"{name}: {{max_ctas: {cap}, min_ctas: 1}}" for name, cap in caps.items()),
    ]
    return "\n".join(lines)
