"""Fit a positive law to positive measurements on the logarithmic scale, with spreads split by run and step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .evidence import Row

Array = NDArray[np.float64]

MIN_LOG_SD = 0.01
"""Clock resolution and rounding of the source tables: no spread is taken to be smaller than 1 %."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Medians and log standard errors of the parameters, and the spreads of the residuals (log scale)."""

    medians: Array
    log_se: Array
    log_run: float
    run_df: int
    log_step: float
    step_df: int
    runs: int
    rows: tuple[str, ...]


def fit_law(law: Callable[[Array], Array], start: Sequence[float], rows: Sequence[Row]) -> Fit:
    """Least squares of log(value) against log(law(parameters)).

    Args:
        law: maps parameters, shape (k,), to predictions, shape (rows,).
        start: starting values, all positive.
        rows: the measurements; their ``corpus`` and ``run`` say which belong together.
    """
    from scipy.optimize import least_squares  # noqa: PLC0415 - a second of import that predictions do not need

    observed = np.log([row.value for row in rows])

    def residuals(log_parameters: Array) -> Array:
        return np.asarray(np.log(law(np.exp(log_parameters))) - observed)

    # Soft L1: a stray measurement (a swapped page, a busy host) must not move the law.
    result = least_squares(residuals, np.log(start), loss="soft_l1", f_scale=0.1, x_scale="jac")
    errors = residuals(result.x)
    runs = [f"{row.corpus}/{row.run}" for row in rows]
    effects = {
        run: float(np.mean([e for e, r in zip(errors, runs, strict=True) if r == run])) for run in runs
    }
    within = errors - np.array([effects[run] for run in runs])
    step_df = max(len(rows) - len(effects), 1)
    log_step = float(np.sqrt(np.sum(within**2) / step_df))
    run_df = max(len(effects) - 1, 1)
    log_run = (
        float(np.sqrt(np.sum(np.square(list(effects.values()))) / run_df)) if len(effects) > 1 else log_step
    )
    # Rows of one run share its effect, so the information is that of the runs, not of the rows.
    jacobian = result.jac
    row_variance = float(np.sum(errors**2) / max(len(rows) - len(start), 1))
    covariance = np.linalg.pinv(jacobian.T @ jacobian) * max(row_variance, MIN_LOG_SD**2)
    rows_per_run = len(rows) / max(len(effects), 1)
    log_se = np.sqrt(np.diag(covariance) * max(rows_per_run * _share(log_run, log_step), 1.0))
    return Fit(
        medians=np.exp(result.x),
        log_se=np.clip(log_se, MIN_LOG_SD, 2.0),
        log_run=max(log_run, MIN_LOG_SD),
        run_df=run_df,
        log_step=max(log_step, MIN_LOG_SD),
        step_df=step_df,
        runs=len(effects),
        rows=tuple(row.id for row in rows),
    )


def _share(log_run: float, log_step: float) -> float:
    """Intra-run correlation: the share of the variance that rows of one run have in common."""
    total = log_run**2 + log_step**2
    return log_run**2 / total if total else 0.0
