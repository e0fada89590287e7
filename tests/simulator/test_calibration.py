"""The bundled calibration is that of the bundled evidence, and held-out rows take no part in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pitstop.errors import PitstopError
from pitstop_simulator.calibrate import calibrate
from pitstop_simulator.calibration import Calibration, Draws, Parameter, load_calibration
from pitstop_simulator.evidence import Evidence, UseOfRow


def _fresh_with(evidence: Evidence, use: set[UseOfRow], factor: float) -> Calibration:
    rows = tuple(replace(r, value=r.value * factor) if r.use in use else r for r in evidence.rows)
    return calibrate(Evidence(rows, evidence.corpora))


def test_the_stored_calibration_is_a_fresh_fit(evidence: Evidence, calibration: Calibration) -> None:
    fresh = calibrate(evidence)
    assert fresh.evidence_digest == calibration.evidence_digest
    assert fresh.row_ids == calibration.row_ids
    assert fresh.ranges == calibration.ranges
    if fresh.id == calibration.id:
        return
    # Another release of numpy or scipy may end the optimiser a few units in the last place apart.
    assert fresh.parameters.keys() == calibration.parameters.keys()
    for name, new in fresh.parameters.items():
        stored = calibration.parameters[name]
        for key in ("median", "log_se", "log_run", "log_step", "log_hardware"):
            assert getattr(new, key) == pytest.approx(getattr(stored, key), rel=1e-4), f"{name}.{key}"
        assert (new.law, new.unit, new.rows) == (stored.law, stored.unit, stored.rows)


def test_held_out_and_site_rows_take_no_part(evidence: Evidence) -> None:
    changed = _fresh_with(evidence, {UseOfRow.HOLDOUT, UseOfRow.SITE}, 10.0)
    assert changed == calibrate(evidence)


def test_the_calibration_can_do_without_held_out_rows(evidence: Evidence) -> None:
    kept = tuple(r for r in evidence.rows if r.use not in (UseOfRow.HOLDOUT, UseOfRow.SITE))
    assert calibrate(Evidence(kept, evidence.corpora)) == calibrate(evidence)


def test_fitted_rows_do_take_part(evidence: Evidence, calibration: Calibration) -> None:
    changed = _fresh_with(evidence, {UseOfRow.FIT}, 2.0)
    assert changed.parameters["create.fixed_s"].median == pytest.approx(
        2 * calibration.parameters["create.fixed_s"].median, rel=0.05
    )
    assert changed.id != calibration.id


def test_used_rows_may_be_fitted(evidence: Evidence, calibration: Calibration) -> None:
    use = {row.id: row.use for row in evidence.rows}
    assert len(set(calibration.row_ids)) == len(calibration.row_ids)
    assert {use[id_] for id_ in calibration.row_ids} == {UseOfRow.FIT}


def test_parameters_are_positive_and_explained(calibration: Calibration) -> None:
    for name, p in calibration.parameters.items():
        assert p.median > 0, name
        assert p.log_se > 0, name
        assert p.source, name
        assert p.rows > 0 or p.log_se >= 0.7, f"{name}: no rows, so it must be wide"


def _draws(p: Parameter, calibration: Calibration, steps: int = 8) -> np.ndarray:
    one = calibration.model_copy(update={"parameters": {"x": p}})
    values = np.log(Draws(one, 4000, 0, foreign=False, steps=steps)["x"])
    return np.asarray(values - np.log(p.median))


def test_few_runs_have_wider_tails(calibration: Calibration) -> None:
    def parameter(run_df: int) -> Parameter:
        return Parameter(
            law="l", unit="s", median=2.0, log_se=0.01, log_run=0.1, run_df=run_df, rows=9, source="test"
        )

    few, many = (np.quantile(np.abs(_draws(parameter(df), calibration)), 0.99) for df in (2, 50))
    assert few > 1.5 * many


def test_more_steps_average_the_step_noise_only(calibration: Calibration) -> None:
    def spread(log_step: float, log_run: float, steps: int) -> float:
        p = Parameter(
            law="l", unit="s", median=2.0, log_se=0.01, log_run=log_run, run_df=50, log_step=log_step, rows=9,
            source="test",
        )  # fmt: skip
        return float(np.std(_draws(p, calibration, steps)))

    assert spread(0.4, 0.0, 100) < 0.2 * spread(0.4, 0.0, 1)
    assert spread(0.0, 0.4, 100) == pytest.approx(spread(0.0, 0.4, 1), rel=0.05)


def test_draw_zero_is_the_median_and_a_seed_repeats(calibration: Calibration) -> None:
    a, b, c = (Draws(calibration, 100, seed, foreign=True, steps=4) for seed in (1, 1, 2))
    for name, p in calibration.parameters.items():
        assert a[name][0] == pytest.approx(p.median)
        assert (a[name] > 0).all()
        assert (a[name] == b[name]).all()
    assert any((a[name] != c[name]).any() for name in calibration.parameters)


def test_strange_hardware_spreads_wider(calibration: Calibration) -> None:
    home, away = (Draws(calibration, 2000, 0, foreign=foreign, steps=8) for foreign in (False, True))
    for name in ("create.fixed_s", "host.alloc_s_per_gib", "comm.channel_bytes"):
        assert np.std(np.log(away[name])) > 1.5 * np.std(np.log(home[name])), name


@pytest.mark.parametrize("text", [None, "", "{}", "not json"])
def test_an_unusable_file(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PitstopError, match="run `pitstop calibrate"):
        load_calibration(path)
