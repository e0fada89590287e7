"""The bundled evidence: one schema, all sources, provenance, and no claim fitted."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pitstop.errors import InvalidEvidenceError
from pitstop_simulator.evidence import Evidence, Kind, UseOfRow, evidence_dir, load_evidence

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "evidence" / "sources"
CORPUS_OF_SOURCE = {
    "h200x2_communicators.csv": "h200x2-communicators",
    "h200x2_lifecycle.csv": "h200x2-lifecycle",
    "h200x2_memory_saver.csv": "h200x2-memory-saver",
    "h200x2_saver_sizes.csv": "h200x2-saver-sizes",
    "h200x2_switch_plans.csv": "h200x2-switch-plans",
    "h200x2_lean_released.csv": "h200x2-lean-released",
    "sglang_2xH200.csv": "sglang-h200x2",
    "task23_4xA6000_qwen3_4b_steps.csv": "task23-4xa6000",
    "task23_8xH20_qwen3_30b_a3b.csv": "task23-8xh20",
    "public_measurements.csv": "public",
}


def test_ids_are_unique_and_name_their_corpus(evidence: Evidence) -> None:
    ids = [row.id for row in evidence.rows]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(rf"{re.escape(row.corpus)}-\d{{4}}", row.id) for row in evidence.rows)


def test_values_and_units(evidence: Evidence) -> None:
    assert {row.unit for row in evidence.rows if row.corpus != "public"} <= {
        "s", "GB/s", "1", "byte/gpu", "byte/rank", "byte", "token", "token/s",
    }  # fmt: skip
    fitted = [row for row in evidence.rows if row.use is UseOfRow.FIT]
    assert fitted
    assert all(row.value > 0 and row.run and row.gpu and row.unit for row in fitted)


def test_every_source_is_represented(evidence: Evidence) -> None:
    assert {path.name for path in SOURCES.iterdir()} == {*CORPUS_OF_SOURCE, "switches"}
    runs = {row.run for row in evidence.rows if row.corpus == "h200x2-runtime"}
    assert runs == {path.stem.replace("-", "/") for path in (SOURCES / "switches").glob("*.jsonl")}
    for name, corpus in CORPUS_OF_SOURCE.items():
        lines = [x for x in (SOURCES / name).read_text().splitlines() if x and not x.startswith("#")]
        records = list(csv.DictReader(lines))
        rows = [row for row in evidence.rows if row.corpus == corpus]
        assert len(rows) >= len([r for r in records if r.get("value", "x")]), name


def test_claims_are_never_fitted(evidence: Evidence) -> None:
    claims = [row for row in evidence.rows if row.kind is Kind.CLAIMED]
    assert claims
    assert all(row.use is UseOfRow.CONTEXT for row in claims)
    for quantity in {row.quantity for row in evidence.rows}:
        assert all(row.kind is not Kind.CLAIMED for row in evidence.fit(quantity))


def test_fit_returns_neither_held_out_nor_site_nor_warm_up_rows(evidence: Evidence) -> None:
    fitted = [row for quantity in {r.quantity for r in evidence.rows} for row in evidence.fit(quantity)]
    assert fitted
    assert {row.use for row in fitted} == {UseOfRow.FIT}
    assert not any(row.warmup for row in fitted)


def test_keepalive_rows_and_whole_switches_are_held_out(evidence: Evidence) -> None:
    for row in evidence.rows:
        if row.corpus.startswith("task23-"):
            expected = UseOfRow.SITE if row.plan == "reload" else UseOfRow.HOLDOUT
            assert row.use is expected, row.id
        if row.corpus == "h200x2-switch-plans":
            expected = UseOfRow.CONTEXT if row.plan == "lean" else UseOfRow.HOLDOUT
            assert row.use is expected, row.id
        if row.corpus == "h200x2-runtime":
            # The first run of a layout is for fitting, and the whole switches of later ones never are.
            assert (row.use is UseOfRow.HOLDOUT) <= (not row.run.endswith("/1")), row.id
            assert (row.use is UseOfRow.FIT) <= row.run.endswith("/1"), row.id


def test_provenance_is_complete(evidence: Evidence) -> None:
    assert {row.corpus for row in evidence.rows} == set(evidence.corpora)
    for name, corpus in evidence.corpora.items():
        for key in ("kind", "who", "where", "hardware", "runs", "steps", "warm_up", "address", "trust"):
            assert corpus.get(key) not in (None, ""), f"{name}.{key}"
        assert isinstance(corpus["versions"], dict), name
        assert name == "public" or corpus["versions"], name


def test_the_bundle_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "evidence" / "scripts" / "bundle.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("value", "nan", "not a finite number"),
        ("value", "inf", "not a finite number"),
        ("value", "", "could not convert"),
        ("kind", "rumoured", "rumoured"),
        ("kind", "claimed", "a claim may only be context"),
        ("use", "guess", "guess"),
        ("corpus", "nowhere", "no provenance"),
        ("step", "first", "invalid literal"),
    ],
)
def test_a_damaged_row_is_named(column: str, value: str, words: str, tmp_path: Path) -> None:
    shutil.copy(evidence_dir() / "corpora.yaml", tmp_path)
    with (evidence_dir() / "rows.csv").open(newline="") as file:
        row = next(csv.DictReader(file))
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow({**row, column: value})
    with pytest.raises(InvalidEvidenceError, match=r"rows\.csv line 2") as caught:
        load_evidence(tmp_path)
    assert words in str(caught.value)
