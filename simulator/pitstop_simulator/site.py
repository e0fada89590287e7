"""Site evidence: a user's own baseline log sharpens the prediction for their machine.

The log gives seconds per phase under `reload`. A phase is a sum of components, and each phase has one that fills it and
that no general law pins down for a strange machine: the saver's pause, the engine's load, the saver's resume. For each
draw of the laws' parameters, what the other components leave of the phase is that component's value; the draw's weight
is the law's own probability density there. This is exact conditioning, by a change of variables.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pitstop.components import Component, Phase
from pitstop.errors import FieldProblem, InvalidEvidenceError, InvalidInputError, show_value
from pitstop.loading import validate
from pitstop.telemetry import StepRecord

from .calibration import Draws
from .costs import SiteFactors
from .schedule import Schedule

MAX_EVIDENCE_BYTES = 20_000_000
MAX_STEPS = 100_000
PHASE_COLUMNS = {Phase.SLEEP: "sleep_s", Phase.UPDATE_WEIGHTS: "update_weights_s", Phase.WAKE_UP: "wake_up_s"}
_FILLING = {
    Phase.SLEEP: Component.SAVER_PAUSE,
    Phase.UPDATE_WEIGHTS: Component.ENGINE_LOAD,
    Phase.WAKE_UP: Component.SAVER_RESUME,
}
_LAW = {
    Phase.SLEEP: "host.alloc_s_per_gib",
    Phase.UPDATE_WEIGHTS: "load.s_per_gib",
    Phase.WAKE_UP: "host.free_s_per_gib",
}
_ENOUGH_STEPS = 3


@dataclass(frozen=True, slots=True)
class SiteEvidence:
    """Steady baseline steps of one site: seconds per phase, shape (steps, 3) in the order of ``Phase``."""

    seconds: NDArray[np.float64]
    held_at_sync_bytes: float | None
    step_s: float | None
    digest: str

    @property
    def steps(self) -> int:
        """Number of steady steps."""
        return len(self.seconds)


def parse_site_evidence(text: bytes, what: str) -> SiteEvidence:
    """Read a baseline log: CSV of per-step phase seconds, or step records (one JSON object a line, or a JSON list).

    CSV columns: ``sleep_s``, ``update_weights_s``, ``wake_up_s``; optional ``step``, ``warmup`` (true/false), ``plan``
    (must be ``reload``), ``step_time_s``, ``held_at_sync_bytes``. Rows marked warm-up are left out.

    Raises:
        InvalidEvidenceError: naming line, column, value and remedy.
    """
    if len(text) > MAX_EVIDENCE_BYTES:
        raise _bad(
            what,
            "(file)",
            f"{len(text):,} bytes",
            f"more than {MAX_EVIDENCE_BYTES:,} bytes",
            "Give fewer steps.",
        )
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _bad(
            what, "(file)", f"byte {error.start}", "not UTF-8 text", "Save the file as UTF-8."
        ) from None
    stripped = decoded.lstrip()
    records = _from_json(stripped, what) if stripped[:1] in ("{", "[") else _from_csv(decoded, what)
    if not records:
        raise _bad(
            what,
            "(file)",
            "no rows",
            "there is no steady step",
            "Give at least one step that is not warm-up.",
        )
    seconds = np.array([r[:3] for r in records], dtype=np.float64)
    held = [r[3] for r in records if r[3] is not None]
    step_s = [r[4] for r in records if r[4] is not None]
    return SiteEvidence(
        seconds=seconds,
        held_at_sync_bytes=float(np.mean(held)) if held else None,
        step_s=float(np.mean(step_s)) if step_s else None,
        digest=hashlib.sha256(text).hexdigest(),
    )


_Record = tuple[float, float, float, float | None, float | None]


def _from_csv(text: str, what: str) -> list[_Record]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    reader = csv.DictReader(io.StringIO("\n".join(lines)))
    names = [name.strip() for name in reader.fieldnames or []]
    missing = [column for column in PHASE_COLUMNS.values() if column not in names]
    if missing:
        found = ", ".join(names[:12]) or "none"
        raise _bad(
            what, ", ".join(missing), f"columns found: {found}", "required column missing",
            "Give the columns sleep_s, update_weights_s, wake_up_s (seconds of the slowest rank per step).",
        )  # fmt: skip
    records = []
    for number, row in enumerate(reader, start=1):
        if number > MAX_STEPS:
            raise _bad(what, "(file)", f"row {number}", f"more than {MAX_STEPS:,} rows", "Give fewer steps.")
        cells = {(k or "").strip(): (v or "").strip() for k, v in row.items() if not isinstance(v, list)}
        plan = cells.get("plan") or cells.get("variant") or "reload"
        if plan not in ("reload", "baseline"):
            raise _bad(
                what,
                f"row {number}, plan",
                show_value(plan),
                "not a baseline row",
                "Keep the rows of plan reload.",
            )
        if cells.get("warmup", "").lower() in ("true", "1", "yes"):
            continue
        values = [_number(what, number, column, cells[column]) for column in PHASE_COLUMNS.values()]
        held = cells.get("held_at_sync_bytes")
        step = cells.get("step_time_s") or cells.get("step_s")
        records.append(
            (
                values[0], values[1], values[2],
                _number(what, number, "held_at_sync_bytes", held, 2.0**50) if held else None,
                _number(what, number, "step_time_s", step) if step else None,
            )
        )  # fmt: skip
    return records


def _number(what: str, number: int, column: str, text: str, limit: float = 86_400.0) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not 0 <= value <= limit:
        raise _bad(
            what, f"row {number}, {column}", show_value(text), f"not a number between 0 and {limit:g}",
            "Correct the value, or mark the row with warmup = true to leave it out.",
        )  # fmt: skip
    return value


def _from_json(text: str, what: str) -> list[_Record]:
    try:
        items = (
            json.loads(text)
            if text[0] == "["
            else [json.loads(line) for line in text.splitlines() if line.strip()]
        )
    except (ValueError, RecursionError) as error:
        raise _bad(
            what, "(file)", "unreadable JSON", str(error)[:200], "Give a JSON list or one object a line."
        ) from None
    records = []
    for number, item in enumerate(items[: MAX_STEPS + 1], start=1):
        try:
            step = validate(StepRecord, item, f"{what}, record {number}")
        except InvalidInputError as error:
            raise InvalidEvidenceError(error.message, error.problems) from None
        absent = [phase.value for phase in Phase if phase not in step.phases]
        if absent:
            raise _bad(
                what,
                f"record {number}, phases",
                "missing " + ", ".join(absent),
                "incomplete step",
                "Give all phases.",
            )
        sleep, update, wake = (step.phases[phase].total_s for phase in Phase)
        held = step.memory.held_at_sync_bytes
        records.append((sleep, update, wake, None if held is None else float(held), step.step_s))
    return records


def _bad(what: str, field: str, value: str, problem: str, remedy: str) -> InvalidEvidenceError:
    return InvalidEvidenceError(f"{what}: unusable evidence", [FieldProblem(field, value, problem, remedy)])


@dataclass(frozen=True, slots=True)
class Conditioned:
    """Draws that fit the site's baseline, with factors for the baseline run and for another run on the site."""

    draws: Draws
    baseline: SiteFactors
    another_run: SiteFactors
    effective_draws: float


def condition(
    site: SiteEvidence, baseline: list[Schedule], draws: Draws, keep: int, seed: int
) -> Conditioned:
    """Weight and resample ``draws`` so that `reload` reproduces the site's phases.

    Args:
        site: the measured baseline.
        baseline: schedules of `reload`, one per class, made from ``draws`` without site factors.
        draws: many prior draws.
        keep: draws wanted.
        seed: for the resampling and the noise.

    Raises:
        InvalidEvidenceError: a phase is shorter than what must happen in it (a wrong scenario or wrong units).
    """
    rng = np.random.default_rng([seed, 1])
    heavy = max(baseline, key=lambda s: float(sum(op.seconds[0] for ops in s.phases.values() for op in ops)))
    mean = site.seconds.mean(axis=0)
    weights = np.ones(draws.count)
    factors, spread = {}, {}
    for index, phase in enumerate(Phase):
        filling = _FILLING[phase]
        prior = sum(
            (op.seconds for op in heavy.phases[phase] if op.component is filling), np.zeros(draws.count)
        )
        others = sum(
            (op.seconds for op in heavy.phases[phase] if op.component is not filling), np.zeros(draws.count)
        )
        # Noise belongs to the filling component: a cooldown does not vary.
        filling_s = max(mean[index] - float(np.median(others)), 0.0)
        own_sd = _step_sd(site, index, filling_s, draws, phase)
        target = mean[index] + own_sd / math.sqrt(site.steps) * rng.standard_normal(draws.count)
        rest = target - others
        if np.mean(rest > 0) < 1e-3:
            raise _bad(
                "site evidence", PHASE_COLUMNS[phase], f"mean {mean[index]:.3f} s",
                f"shorter than the {np.median(others):.3f} s that the plan `reload` spends in {phase.value} before "
                f"{filling.value}",
                "Check the unit (seconds), that the rows are of the baseline, and trainer.cooldown_s.",
            )  # fmt: skip
        ratio = np.where((rest > 0) & (prior > 0), rest / np.maximum(prior, 1e-12), 1.0)
        sd = max(draws.log_sd[_LAW[phase]], 0.3)
        weights *= (
            np.where(rest > 0, np.exp(-0.5 * (np.log(np.maximum(ratio, 1e-9)) / sd) ** 2), 0.0)
            if prior.any()
            else 1
        )
        factors[phase] = ratio
        spread[phase] = own_sd / max(filling_s, 0.1 * mean[index], 1e-9)
    if weights.sum() <= 0:
        weights = np.ones(draws.count)
    weights /= weights.sum()
    # Systematic resampling: the least noisy way to turn weights into draws.
    positions = (rng.random() + np.arange(keep)) / keep
    picked = np.minimum(np.searchsorted(np.cumsum(weights), positions), draws.count - 1).astype(np.intp)
    picked = rng.permutation(picked)
    taken = draws.take(picked)
    chosen = [factors[phase][picked] for phase in Phase]
    another = []
    for phase, factor in zip(Phase, chosen, strict=True):
        parameter_run = draws.log_run[_LAW[phase]]
        # Both the baseline run and the other run deviate from the machine's long-run mean: hence twice the variance.
        sd = math.sqrt(2 * parameter_run**2 + spread[phase] ** 2 / site.steps)
        another.append(factor * np.exp(sd * rng.standard_normal(keep)))
    return Conditioned(taken, SiteFactors(*chosen), SiteFactors(*another), float(1 / np.sum(weights**2)))


def _step_sd(site: SiteEvidence, index: int, filling_s: float, draws: Draws, phase: Phase) -> float:
    """Step-to-step standard deviation of a phase in seconds: the site's own with enough steps, else the laws'."""
    general = draws.log_step[_LAW[phase]] * filling_s
    if site.steps < _ENOUGH_STEPS:
        return general
    return float(np.std(site.seconds[:, index], ddof=1))
