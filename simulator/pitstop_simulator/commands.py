"""The simulator's sub-commands of `pitstop`: predict, evidence, validate, calibrate."""

from __future__ import annotations

from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from pitstop.cli.output import console, emit_json
from pitstop.errors import FieldProblem, InvalidInputError, show_value
from pitstop.loading import load_scenario, read_limited
from pitstop.plan import named_plan
from pitstop.units import GIB


def register(app: typer.Typer) -> None:
    """Add the commands to the `pitstop` application."""
    app.command("predict")(predict_command)
    app.command("validate")(validate_command)
    app.command("calibrate")(calibrate_command)
    evidence_app = typer.Typer(help="Look at the bundled evidence.", no_args_is_help=True)
    evidence_app.command("list")(evidence_list_command)
    evidence_app.command("show")(evidence_show_command)
    app.add_typer(evidence_app, name="evidence")


def predict_command(
    scenario: Annotated[Path, typer.Argument(help="Scenario file, YAML or JSON.")],
    plan: Annotated[
        list[str] | None, typer.Option(help="Predict only this plan (repeatable); see `pitstop plans`.")
    ] = None,
    evidence: Annotated[
        Path | None,
        typer.Option(help="Your baseline log: CSV of sleep_s, update_weights_s, wake_up_s, or step records."),
    ] = None,
    budget_gib: Annotated[
        float | None,
        typer.Option(help="Most GiB per GPU that the trainer may hold at weight sync and in the rollout."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    draws: Annotated[int, typer.Option(help="Monte Carlo draws, 50 to 5,000.")] = 200,
    json: Annotated[bool, typer.Option("--json", help="Print the prediction as JSON.")] = False,
) -> None:
    """Predict what each switch plan would cost on a scenario, and recommend one."""
    from .predict import predict  # noqa: PLC0415 - numpy and simpy only when needed
    from .site import MAX_EVIDENCE_BYTES, parse_site_evidence  # noqa: PLC0415

    chosen = [named_plan(name) for name in plan or []]
    parsed = load_scenario(scenario)
    site = (
        None
        if evidence is None
        else parse_site_evidence(read_limited(evidence, MAX_EVIDENCE_BYTES), str(evidence))
    )
    if budget_gib is not None and not 0 < budget_gib <= 1_000_000:
        problem = FieldProblem(
            "--budget-gib", show_value(budget_gib), "not a positive size in GiB", "Give e.g. 2.5."
        )
        raise InvalidInputError("unusable budget", [problem])
    budget_bytes = None if budget_gib is None else round(budget_gib * GIB)
    result = predict(
        parsed, plans=chosen or None, site=site, budget_bytes=budget_bytes, seed=seed, draws=draws
    )
    if json:
        emit_json(result)
        return
    from . import render  # noqa: PLC0415

    render.prediction(console(), result, budget_gib is not None)


def validate_command(
    json: Annotated[bool, typer.Option("--json", help="Print cases and summary as JSON.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
) -> None:
    """Predict every held-out observation of the bundled evidence and show error and coverage."""
    from .validation import validate_predictions  # noqa: PLC0415

    result = validate_predictions(seed=seed)
    if json:
        emit_json(result)
        return
    from . import render  # noqa: PLC0415

    render.validation(console(), result)


class _CheckMode(StrEnum):
    WRITE = "write"
    CHECK = "check"


def calibrate_command(
    mode: Annotated[
        _CheckMode, typer.Argument(help="write: refit and store; check: compare with the stored one.")
    ] = (_CheckMode.CHECK),
) -> None:
    """Fit the cost laws to the bundled evidence again."""
    from pitstop.errors import MissingExtraError, PitstopError  # noqa: PLC0415

    from .calibrate import calibrate  # noqa: PLC0415
    from .calibration import CALIBRATION_FILE, load_calibration  # noqa: PLC0415
    from .evidence import evidence_dir  # noqa: PLC0415

    if find_spec("scipy") is None:
        raise MissingExtraError("fitting needs scipy: pip install 'pitstop[calibration]'")
    fresh = calibrate()
    if mode is _CheckMode.WRITE:
        (evidence_dir() / CALIBRATION_FILE).write_text(
            fresh.model_dump_json(indent=1) + "\n", encoding="utf-8"
        )
    elif not (stored := load_calibration()).agrees_with(fresh):
        raise PitstopError(
            f"stored calibration {stored.id} is not what evidence and laws give; run `pitstop calibrate write`"
        )
    console().print(f"{fresh.id}: {len(fresh.parameters)} parameters from {len(fresh.row_ids)} rows")


def evidence_list_command(
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """List the bundled corpora with their provenance."""
    from .evidence import load_evidence  # noqa: PLC0415

    bundle = load_evidence()
    if json:
        counts = {name: sum(row.corpus == name for row in bundle.rows) for name in bundle.corpora}
        emit_json({name: {**corpus, "rows": counts[name]} for name, corpus in bundle.corpora.items()})
        return
    from . import render  # noqa: PLC0415

    render.evidence_list(console(), bundle)


def evidence_show_command(
    corpus: Annotated[str, typer.Argument(help="Corpus name, see `pitstop evidence list`.")],
    quantity: Annotated[str | None, typer.Option(help="Only this quantity.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Show the rows of one corpus."""
    from dataclasses import asdict  # noqa: PLC0415

    from .evidence import load_evidence  # noqa: PLC0415

    bundle = load_evidence()
    if corpus not in bundle.corpora:
        problem = FieldProblem(
            "corpus",
            show_value(corpus),
            "no corpus has this name",
            f"Use one of: {', '.join(bundle.corpora)}.",
        )
        raise InvalidInputError("unknown corpus", [problem])
    rows = [r for r in bundle.rows if r.corpus == corpus and (quantity is None or r.quantity == quantity)]
    if json:
        emit_json(
            {"corpus": corpus, "provenance": bundle.corpora[corpus], "rows": [asdict(row) for row in rows]}
        )
        return
    from . import render  # noqa: PLC0415

    render.evidence_rows(console(), rows)
