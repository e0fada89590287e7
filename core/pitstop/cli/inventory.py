"""``pitstop inventory``: the process groups of one rank, and the classes into which all ranks fold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pitstop.cli.options import JsonOption, ScenarioArgument
from pitstop.cli.output import console, emit_json, table
from pitstop.loading import load_scenario
from pitstop.scenario import GroupCreation, Scenario

if TYPE_CHECKING:
    from pitstop.inventory import Group, RankClass


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("inventory")(inventory_command)


def inventory_command(
    scenario: ScenarioArgument,
    rank: Annotated[int, typer.Option(help="Global rank whose groups to show.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Show the process groups of one rank, their communicators, and the classes of equal ranks."""
    found = inventory(load_scenario(scenario), rank)
    if as_json:
        emit_json(found)
    else:
        _print(found)


def inventory(scenario: Scenario, rank: int) -> dict[str, Any]:
    """What ``inventory --json`` prints.

    Raises:
        InvalidScenarioError: Megatron would refuse the layout, or there is no such rank.
    """
    from pitstop.inventory import (  # noqa: PLC0415 - numpy costs start-up time
        Topology,
        groups_of_rank,
        rank_classes,
        shared_rank_sets,
        world_group,
    )

    rules = Topology.of(scenario).rules
    groups = (world_group(scenario), *groups_of_rank(scenario, rank))
    # A group of one rank has no communicator worth sharing.
    shared = shared_rank_sets(group for group in groups if not group.is_single)
    partners = {name: [other for other in s.names if other != name] for s in shared for name in s.names}
    return {
        "scenario": scenario.name,
        "world_size": scenario.world_size,
        "group_creation": scenario.trainer.group_creation.value,
        "megatron": scenario.versions.megatron,
        "megatron_rules": rules.version,
        "note": rules.note,
        "rank": rank,
        "groups": [_group(group, scenario, partners.get(group.name, [])) for group in groups],
        "classes": [_rank_class(each, scenario) for each in rank_classes(scenario)],
    }


def _group(group: Group, scenario: Scenario, partners: list[str]) -> dict[str, Any]:
    from pitstop.inventory import Use  # noqa: PLC0415 - numpy costs start-up time
    from pitstop.inventory.placement import span_of  # noqa: PLC0415

    span = span_of(group.ranks, scenario.hardware)
    return {
        "name": group.name,
        "config_name": group.config_name,
        "backend": group.backend.value,
        "size": group.size,
        "nodes": span.nodes,
        "gpus": span.gpus,
        "created": _created(group, scenario),
        "used_in_step": Use.STEP in group.uses,
        "used_in_export": Use.EXPORT in group.uses,
        "hot": group.hot,
        "shared_with": partners,
        "ranks": list(group.ranks),
    }


def _created(group: Group, scenario: Scenario) -> str:
    """When the group's communicator comes into being."""
    from pitstop.inventory import Backend, Use  # noqa: PLC0415 - numpy costs start-up time

    if group.backend is Backend.GLOO or scenario.trainer.group_creation is GroupCreation.EAGER:
        return "at start"
    if Use.STEP in group.uses:
        return "in step"
    if Use.EXPORT in group.uses:
        return "at export"
    return "on use" if group.is_world else "never"


def _rank_class(each: RankClass, scenario: Scenario) -> dict[str, Any]:
    from pitstop.inventory import Use  # noqa: PLC0415 - numpy costs start-up time

    use = Use.STEP if scenario.trainer.group_creation is GroupCreation.LAZY else None
    return {
        "representative": each.representative,
        "count": each.count,
        "dense_layers": each.stage.dense_layers,
        "moe_layers": each.stage.moe_layers,
        "first_stage": each.stage.is_first,
        "last_stage": each.stage.is_last,
        "communicators": len(each.communicators(use)),
        "communicators_shared": len(each.communicators(use, share=True)),
        "communicators_if_eager": len(each.communicators()),
        "used_in_export": len(each.communicators(Use.EXPORT)),
    }


def _print(found: dict[str, Any]) -> None:
    out = console()
    groups = table(
        ("#", "group", "backend", "size", "nodes", "created", "export", "hot", "same ranks as"),
        title=f"{found['scenario']}: groups of rank {found['rank']} of {found['world_size']}",
        numbers=("#", "size", "nodes"),
    )
    # Names are long and several groups may share a communicator: numbers keep the table readable.
    numbers = {group["name"]: str(i) for i, group in enumerate(found["groups"])}
    for group in found["groups"]:
        groups.add_row(
            numbers[group["name"]],
            group["name"],
            group["backend"],
            str(group["size"]),
            str(group["nodes"]),
            group["created"],
            "yes" if group["used_in_export"] else "",
            "yes" if group["hot"] else "",
            ", ".join(numbers[name] for name in group["shared_with"]),
        )
    out.print(groups)
    count = len(found["classes"])
    classes = table(
        (
            "rank",
            "ranks alike",
            "layers",
            "of which MoE",
            "stage",
            "communicators",
            "shared",
            "all",
            "export",
        ),
        title=f"{found['world_size']} ranks in {count} {'class' if count == 1 else 'classes'} of equal cost",
        numbers=("rank", "ranks alike", "layers", "of which MoE", "communicators", "shared", "all", "export"),
    )
    for each in found["classes"]:
        ends = [name for name in ("first", "last") if each[f"{name}_stage"]]
        classes.add_row(
            str(each["representative"]),
            str(each["count"]),
            str(each["dense_layers"] + each["moe_layers"]),
            str(each["moe_layers"]),
            " and ".join(ends) or "middle",
            str(each["communicators"]),
            str(each["communicators_shared"]),
            str(each["communicators_if_eager"]),
            str(each["used_in_export"]),
        )
    out.print(classes)
    how = {"lazy": "those that a training step creates", "eager": "all, created at start"}
    out.print(
        "communicators: NCCL, of more than one rank, without the default group; "
        f"{how[found['group_creation']]}. "
        "shared: if equal rank sets share one. all: if every group had one."
    )
    asked = found["megatron"] or "not stated"
    out.print(f"megatron-core {asked}; groups by the rules of {found['megatron_rules']}.")
    if found["note"]:
        out.print(found["note"])
