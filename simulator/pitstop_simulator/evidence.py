"""The bundled evidence: measured, reported and claimed rows in one schema, with provenance per corpus.

The schema is documented in ``evidence/README.md``. ``load_evidence`` is the one way in.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from pitstop.errors import FieldProblem, InvalidEvidenceError, show_value


class Kind(StrEnum):
    """How far a row can be trusted: measured by us, reported by others with figures, or merely claimed."""

    MEASURED = "measured"
    REPORTED = "reported"
    CLAIMED = "claimed"


class UseOfRow(StrEnum):
    """What a row may be used for."""

    FIT = "fit"
    SITE = "site"
    HOLDOUT = "holdout"
    CONTEXT = "context"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``value`` is in ``unit`` (s, GB/s, byte/gpu, byte/rank, ...); conditions may be absent (None)."""

    id: str
    corpus: str
    kind: Kind
    use: UseOfRow
    run: str
    step: int | None
    warmup: bool
    quantity: str
    value: float
    unit: str
    n: int | None
    gpu: str
    ranks_per_gpu: int | None
    world_size: int | None
    layout: str
    nccl: str
    plan: str
    communicators: int | None
    rank_sets: int | None
    max_ctas: int | None
    config: str
    payload_bytes: int | None
    backup: str
    source: str
    note: str


@dataclass(frozen=True)
class Evidence:
    """All rows and the provenance of their corpora."""

    rows: tuple[Row, ...]
    corpora: dict[str, dict[str, Any]]

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over the rows that may be fitted or compared with machines: what a calibration depends on."""
        used = (r for r in self.rows if r.use in (UseOfRow.FIT, UseOfRow.CONTEXT))
        return hashlib.sha256("\n".join(repr(r) for r in used).encode()).hexdigest()

    def select(self, quantity: str | None = None, *, steady: bool = True, **conditions: object) -> list[Row]:
        """Rows of a quantity that meet all conditions; ``steady`` leaves warm-up rows out."""
        return [
            row
            for row in self.rows
            if (quantity is None or row.quantity == quantity)
            and not (steady and row.warmup)
            and all(getattr(row, name) == value for name, value in conditions.items())
        ]

    def fit(self, quantity: str, **conditions: object) -> list[Row]:
        """Rows that laws may be fitted to; a claim never is."""
        return [
            r
            for r in self.select(quantity, steady=True, use=UseOfRow.FIT, **conditions)
            if r.kind is not Kind.CLAIMED
        ]


def evidence_dir() -> Path:
    """Where the bundled evidence lies: inside the installed package, or in the source checkout."""
    here = Path(__file__).resolve().parent
    packaged = here / "_evidence"
    return packaged if packaged.is_dir() else here.parent.parent / "evidence"


def load_evidence(directory: Path | None = None) -> Evidence:
    """Load the bundled evidence (or another directory of the same form).

    Raises:
        InvalidEvidenceError: a row has a missing column, an unknown kind, a value that is not a finite number, or
            names a corpus without provenance.
    """
    directory = directory or evidence_dir()
    corpora = yaml.safe_load((directory / "corpora.yaml").read_text(encoding="utf-8"))
    with (directory / "rows.csv").open(newline="", encoding="utf-8") as file:
        rows = tuple(_rows(csv.DictReader(file), corpora))
    return Evidence(rows, corpora)


def _rows(records: Iterable[dict[str, str]], corpora: dict[str, Any]) -> Iterable[Row]:
    for line, record in enumerate(records, start=2):
        try:
            fields: dict[str, Any] = {
                **record,
                "kind": Kind(record["kind"]),
                "use": UseOfRow(record["use"]),
                "warmup": record["warmup"] == "true",
                "value": float(record["value"]),
                **{name: int(record[name]) if record[name] else None for name in _INTEGERS},
            }
            row = Row(**fields)
        except (KeyError, ValueError, TypeError) as error:
            raise _bad(line, show_value(record), str(error)) from None
        if row.corpus not in corpora:
            raise _bad(line, row.corpus, "no provenance for this corpus in corpora.yaml")
        if not row.value == row.value or abs(row.value) == float("inf"):
            raise _bad(line, row.id, "value is not a finite number")
        if row.kind is Kind.CLAIMED and row.use is not UseOfRow.CONTEXT:
            raise _bad(line, row.id, "a claim may only be context")
        yield row


_INTEGERS = (
    "step", "n", "ranks_per_gpu", "world_size", "communicators", "rank_sets", "max_ctas", "payload_bytes",
)  # fmt: skip


def _bad(line: int, value: str, problem: str) -> InvalidEvidenceError:
    field = FieldProblem(f"rows.csv line {line}", value, problem, "Correct the row or rebuild the file.")
    return InvalidEvidenceError("bundled evidence is damaged", [field])
