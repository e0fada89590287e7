"""``pitstop gates``: which plans a scenario allows, and what is left to be checked in the trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pitstop.cli.options import JsonOption, ScenarioArgument
from pitstop.cli.output import console, emit_json, table
from pitstop.errors import FieldProblem, InvalidInputError, InvalidPlanError, show_value, use_one_of
from pitstop.loading import load_scenario, parse_document, read_limited, validate
from pitstop.plan import NAMED_PLANS, Plan
from pitstop.scenario import Scenario

if TYPE_CHECKING:
    from rich.table import Table

    from pitstop.gates import GateResult, Verdict

_NOT_KNOWN = "not known"
_IN_WORDS = {"open": "open", "closed": "closed", "unknown": "to check"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("gates")(gates_command)


def gates_command(
    scenario: ScenarioArgument,
    plan: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Show every gate of one plan: a named one, or one in a file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show which plans may be carried out on a scenario, and what has to be checked in the trainer first."""
    from pitstop.gates import facts_of, judge  # noqa: PLC0415 - numpy costs start-up time

    parsed = load_scenario(scenario)
    chosen = list(NAMED_PLANS.values()) if plan is None else [find_plan(plan)]
    facts = facts_of(parsed)
    verdicts = [judge(each, facts) for each in chosen]
    if as_json:
        emit_json(_document(parsed, asdict(facts), verdicts))
    elif plan is None:
        _print_summary(parsed, verdicts)
    else:
        _print_plan(parsed, verdicts[0])


def find_plan(name_or_file: str) -> Plan:
    """A named plan, or else the plan in a file.

    Raises:
        InvalidPlanError: there is neither a plan nor a file of this name, or the file holds no good plan.
    """
    if name_or_file in NAMED_PLANS:
        return NAMED_PLANS[name_or_file]
    path = Path(name_or_file)
    if not (path.exists() or path.suffix in (".yaml", ".yml", ".json") or "/" in name_or_file):
        remedy = f"{use_one_of(name_or_file, NAMED_PLANS)} Or give a plan's file."
        problem = FieldProblem("plan", show_value(name_or_file), "no plan and no file has this name", remedy)
        raise InvalidPlanError("unknown plan", [problem])
    try:
        return validate(Plan, parse_document(read_limited(path), str(path)), str(path))
    except InvalidInputError as error:
        raise InvalidPlanError(error.message, error.problems) from None


def _document(scenario: Scenario, facts: dict[str, Any], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """What ``gates --json`` prints."""
    return {
        "scenario": scenario.name,
        "live": False,
        "facts": facts,
        "plans": [verdict.as_dict() for verdict in verdicts],
    }


def _print_summary(scenario: Scenario, verdicts: Sequence[Verdict]) -> None:
    out = console()
    summary = table(
        ("plan", "allowed", "closed", "warnings", "to check"), title=scenario.name, numbers=("to check",)
    )
    for verdict in verdicts:
        summary.add_row(
            verdict.plan.name,
            _allowed(verdict),
            _codes(verdict.closed),
            _codes(verdict.warned),
            str(len(verdict.unknown) or ""),
        )
    out.print(summary)
    closed = _by_gate(verdicts, lambda verdict: (*verdict.closed, *verdict.warned))
    if closed:
        made = table(("gate", "plans", "seen", "remedy"), title="Closed, or warned of")
        for code, (result, names) in closed.items():
            made.add_row(code, _plans(names, verdicts), _plain(result.finding.value), result.finding.remedy)
        out.print(made)
    unknown = _by_gate(verdicts, lambda verdict: verdict.unknown)
    if unknown:
        out.print(_to_check(unknown, verdicts))
        out.print(
            "In the trainer, a plan with an open question is not carried out, except one that does no more than "
            "the baseline does."
        )
    out.print("--plan shows every gate of one plan, with what goes wrong otherwise, remedy and source.")


def _to_check(unknown: dict[str, tuple[GateResult, list[str]]], verdicts: Sequence[Verdict]) -> Table:
    """What the trainer has to answer, under the plans that it matters to."""
    made = table(("gate", "must hold"), title="To be checked in the trainer")
    by_plans: dict[str, list[GateResult]] = {}
    for result, names in sorted(unknown.values(), key=lambda item: -len(item[1])):
        by_plans.setdefault(_plans(names, verdicts), []).append(result)
    for plans, results in by_plans.items():
        made.add_section()
        made.add_row("", f"for {plans}:")
        for result in results:
            seen = "" if result.finding.value == _NOT_KNOWN else f" ({result.finding.value})"
            made.add_row(result.code, _plain(result.gate.title + seen))
    return made


def _print_plan(scenario: Scenario, verdict: Verdict) -> None:
    title = f"{scenario.name}, {verdict.plan.name}: allowed: {_allowed(verdict)}"
    made = table(("gate", "verdict", "must hold, seen, why, remedy"), title=title)
    # What stands in the way comes first.
    order = ("closed", "warning", "to check", "open")
    for result in sorted(verdict.results, key=lambda result: order.index(_word(result))):
        lines = [f"{result.gate.title}: {result.finding.value}", f"{result.gate.why} ({result.gate.source})"]
        if result.finding.remedy:
            lines.append(f"Remedy: {result.finding.remedy}")
        made.add_row(result.code, _word(result), _plain("\n".join([*lines, ""])))
    console().print(made)


def _plain(text: str) -> str:
    """Text for a table's cell; a version or a name may hold brackets, which are no markup."""
    from rich.markup import escape  # noqa: PLC0415 - costs start-up time

    return escape(text)


def _word(result: GateResult) -> str:
    return "warning" if result.warned else _IN_WORDS[result.finding.verdict.value]


def _allowed(verdict: Verdict) -> str:
    """Whether the plan may be carried out, in words; see ``Verdict`` for whom doubt refuses."""
    if not verdict.allowed:
        return "no"
    if not any(result.gate.refuses for result in verdict.unknown):
        return "yes"
    return "once checked" if replace(verdict, live=True).blocking else "unless a check fails"


def _codes(results: Sequence[GateResult]) -> str:
    return ", ".join(result.code for result in results)


def _by_gate(
    verdicts: Sequence[Verdict], chosen: Callable[[Verdict], Sequence[GateResult]]
) -> dict[str, tuple[GateResult, list[str]]]:
    """Results by the gate's code, each with the names of the plans that it guards."""
    found: dict[str, tuple[GateResult, list[str]]] = {}
    for verdict in verdicts:
        for result in chosen(verdict):
            found.setdefault(result.code, (result, []))[1].append(verdict.plan.name)
    return found


def _plans(names: Sequence[str], verdicts: Sequence[Verdict]) -> str:
    """Names of plans, put as what is left out where that is shorter."""
    others = [verdict.plan.name for verdict in verdicts if verdict.plan.name not in names]
    if not others:
        return "all plans"
    return f"all plans but {', '.join(others)}" if len(others) < len(names) else ", ".join(names)
