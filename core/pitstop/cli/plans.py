"""``pitstop plans``: what each named plan does."""

from __future__ import annotations

import typer

from pitstop.cli.options import JsonOption
from pitstop.cli.output import console, emit_json, table
from pitstop.plan import BASELINE, NAMED_PLANS, Export, Plan

COLUMNS = ("plan", "training groups", "shared", "cold cap", "export", "cooldown", "backup", "canary")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plans")(plans_command)


def plans_command(as_json: JsonOption = False) -> None:
    """Show the named plans: what a switch does to communicators, cooldown and host backups under each."""
    if as_json:
        emit_json(
            {
                "baseline": BASELINE.name,
                "plans": [plan.model_dump(mode="json") for plan in NAMED_PLANS.values()],
            }
        )
        return
    details, summaries = table(COLUMNS), table(("plan", "in words"))
    for plan in NAMED_PLANS.values():
        details.add_row(*_row(plan))
        summaries.add_row(plan.name, plan.summary)
    out = console()
    out.print(summaries)
    out.print(details)


def _row(plan: Plan) -> tuple[str, ...]:
    release = ", beside the copy" if plan.background_release else ""
    return (
        plan.name,
        plan.training.value + release,
        _yes(plan.share),
        "none" if plan.cold_max_ctas is None else str(plan.cold_max_ctas),
        _export(plan),
        plan.cooldown.value,
        plan.backup.value,
        _yes(plan.canary),
    )


def _export(plan: Plan) -> str:
    if plan.export is Export.COMMUNICATOR:
        return f"own, {plan.export_max_ctas} channels, kept"
    return "copies between GPUs" if plan.export is Export.COPIES else "training groups"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
