"""Tables and sentences of the simulator's commands."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from pitstop.components import Phase
from pitstop.prediction import Interval, Prediction, Verdict
from pitstop.units import GIB, MIB

from .evidence import Evidence, Row
from .validation import Validation

WIDE_COLUMNS = 116
"""Columns from which the table of plans shows everything."""


def seconds(value: Interval) -> str:
    """`9.74 s (8.11 to 11.6)`."""
    return f"{_short(value.mean)} ({_short(value.lo)} to {_short(value.hi)})"


def _short(value: float) -> str:
    if abs(value) < 0.005:
        return "0"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def gibibytes(value: Interval) -> str:
    """Mean in GiB, with the half-width where it would show."""
    half = (value.hi - value.lo) / 2 / GIB
    return f"{value.mean / GIB:.1f}" + (f" ± {half:.1f}" if half >= 0.05 else "")


def prediction(console: Console, result: Prediction, budget: bool) -> None:
    """The answer to `pitstop predict`."""
    console.print()
    console.print(f"[bold]{result.scenario}[/bold]  [dim]calibration {result.calibration.id}, "
                  f"{result.calibration.rows_used} evidence rows" + (
                      f" + {result.calibration.site_rows_used} of your own" if result.calibration.site_rows_used else ""
                  ) + f", seed {result.seed}[/dim]")  # fmt: skip
    console.print(_plans_table(result, wide=console.width >= WIDE_COLUMNS))
    level = f"{result.plans[0].switch_s.level:.0%}"
    held = (
        "at sync, rollout: GiB per GPU that the trainer holds then. host: GiB of pinned memory kept per node."
    )
    if console.width < WIDE_COLUMNS:
        held = "held: most GiB per GPU that the trainer holds while paused."
    console.print(
        f"[dim]* recommended   ! refused or over budget\n"
        f"Seconds as mean ({level} interval). next: communicators created inside the next training step.\n{held}[/dim]"
    )
    console.print(f"[bold]Support:[/bold] {result.support.verdict.value}")
    for reason in result.support.reasons:
        console.print(f"  - {reason}", highlight=False)
    console.print(f"[bold]What dominates:[/bold] {result.dominant}", highlight=False)
    console.print(f"[bold]Recommended:[/bold] [green]{result.recommended.plan}[/green]")
    for reason in result.recommended.reasons:
        console.print(f"  - {reason}", highlight=False)
    chosen = next((p for p in result.plans if p.plan == result.recommended.plan), None)
    extra = [r for r in (chosen.support.reasons if chosen else []) if r not in result.support.reasons]
    for note in [*extra, *(chosen.notes if chosen else []), *result.version_notes]:
        console.print(f"  [dim]note: {note}[/dim]", highlight=False)
    if budget and result.budget_bytes:
        console.print(f"[dim]Budget: {result.budget_bytes / GIB:.2f} GiB per GPU[/dim]")


def _plans_table(result: Prediction, *, wide: bool) -> Table:
    """All plans side by side; phases, next step and host memory only where there is room for them."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("plan", no_wrap=True)
    extra = ("sleep", "update", "wake", "next") if wide else ()
    held = ("at sync", "rollout", "host") if wide else ("held",)
    for name in ("switch s", "gain s", *extra, *held):
        table.add_column(name, justify="right", no_wrap=True)
    for plan in result.plans:
        recommended = plan.plan == result.recommended.plan
        refused = plan.support.verdict is Verdict.REFUSED
        style = "bold green" if recommended else "dim" if refused or not plan.within_budget else ""
        mark = "* " if recommended else "! " if refused or not plan.within_budget else "  "
        cells = [mark + plan.plan, seconds(plan.switch_s), seconds(plan.gain_s)]
        if wide:
            cells += [_short(plan.phases[p].mean) for p in Phase] + [_short(plan.first_step_s.mean)]
        at_sync, rollout = plan.held_at_sync_bytes, plan.held_in_rollout_bytes
        if wide:
            cells += [gibibytes(at_sync), gibibytes(rollout), f"{plan.host_pinned_bytes.mean / GIB:.0f}"]
        else:
            cells.append(gibibytes(max(at_sync, rollout, key=lambda held: held.mean)))
        table.add_row(*cells, style=style)
    return table


def evidence_list(console: Console, evidence: Evidence) -> None:
    """One line per corpus."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("corpus", "kind", "rows", "use", "where", "runs", "trust"):
        table.add_column(name, justify="right" if name == "rows" else "left", overflow="fold")
    for name, corpus in evidence.corpora.items():
        rows = [row for row in evidence.rows if row.corpus == name]
        use = ", ".join(sorted({row.use.value for row in rows}))
        table.add_row(
            name, corpus["kind"], str(len(rows)), use, corpus["where"], str(corpus["runs"]), corpus["trust"]
        )
    console.print(table)


def evidence_rows(console: Console, rows: list[Row]) -> None:
    """The rows of one corpus."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("id", "kind", "use", "run", "step", "quantity", "value", "unit", "conditions"):
        table.add_column(name, justify="right" if name in ("value", "step") else "left", overflow="fold")
    conditions = (
        "plan",
        "layout",
        "nccl",
        "communicators",
        "max_ctas",
        "payload_bytes",
        "backup",
        "source",
        "note",
    )
    for row in rows:
        text = ", ".join(f"{n}={getattr(row, n)}" for n in conditions if getattr(row, n) not in (None, ""))
        step = "" if row.step is None else str(row.step)
        table.add_row(
            row.id, row.kind.value, row.use.value + (" (warm-up)" if row.warmup else ""), row.run, step, row.quantity,
            f"{row.value:g}", row.unit, text,
        )  # fmt: skip
    console.print(table)


def validation(console: Console, result: Validation) -> None:
    """Held-out values against their predictions."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("case", "quantity", "observed", "predicted", "error", "inside"):
        table.add_column(name, justify="left" if name in ("case", "quantity") else "right", overflow="fold")
    for case in result.cases:
        in_bytes = case.quantity.endswith("_bytes")
        scale = MIB if in_bytes else 1.0
        p = case.predicted
        form = "{:,.0f}" if in_bytes else "{:.2f}"
        low, mean, high = (form.format(v / scale) for v in (p.lo, p.mean, p.hi))
        unit = "MiB" if in_bytes else "s"
        table.add_row(
            case.id, case.quantity, f"{form.format(case.observed / scale)} {unit}", f"{mean} ({low} to {high})",
            f"{case.ape:.1%}", "[green]yes[/green]" if case.inside else "[red]no[/red]",
        )  # fmt: skip
    console.print(table)
    s = result.summary
    console.print(
        f"{s.n} held-out values: median error {s.median_ape:.1%}, 90th percentile {s.p90_ape:.1%}; "
        f"{s.coverage:.0%} inside their {s.level:.0%} intervals; {s.refused} refused  [dim]({result.calibration})[/dim]"
    )
