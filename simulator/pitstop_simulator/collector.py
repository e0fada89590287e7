"""What a calibration is collected in: parameters from fits and priors, and their spreads pooled over laws."""

from __future__ import annotations

from .calibration import Parameter
from .fitting import Fit

_POOLED_LAWS = ("create", "suspend", "resume", "saver.pause", "saver.resume", "engine")
"""Laws of components that take long enough for their spread to be more than clock noise."""

_POOL_DF = 4
"""Weight of the pool, in degrees of freedom."""


class Collector:
    """Collects parameters and the rows they were fitted to."""

    def __init__(self) -> None:
        self.parameters: dict[str, Parameter] = {}
        self.rows: set[str] = set()
        self.spreads: dict[str, Fit] = {}

    def add_fit(self, law: str, names: dict[str, str], fit: Fit, source: str) -> None:
        """Add a fit's parameters; ``names`` maps name to unit, in the fit's order."""
        self.rows |= set(fit.rows)
        self.spreads[law] = fit
        for (name, unit), median, log_se in zip(names.items(), fit.medians, fit.log_se, strict=True):
            self.parameters[name] = Parameter(
                law=law,
                unit=unit,
                median=rounded(median),
                log_se=rounded(log_se),
                log_run=rounded(fit.log_run),
                run_df=fit.run_df,
                log_step=rounded(fit.log_step),
                rows=len(fit.rows),
                source=source,
            )

    def add_prior(
        self, law: str, name: str, unit: str, median: float, log_se: float, source: str, rows: int = 0
    ) -> None:
        """Add a parameter that no fitted row determines; ``source`` says where it comes from."""
        self.parameters[name] = Parameter(
            law=law, unit=unit, median=rounded(median), log_se=rounded(log_se), rows=rows, source=source
        )

    def __getitem__(self, name: str) -> float:
        return self.parameters[name].median

    def pool_spreads(self) -> None:
        """Shrink each timing law's spreads towards those of all timing laws: few runs say little about a spread.

        The usual moderated variance: (d0 s0^2 + d s^2) / (d0 + d), with the pool's variance s0^2 and d0 degrees of
        freedom. A law seen in one run has no run-to-run spread of its own and takes the pool's.
        """
        pooled = {law: self.spreads[law] for law in _POOLED_LAWS}
        step = _weighted_variance([(f.log_step, f.step_df) for f in pooled.values()])
        run = _weighted_variance([(f.log_run, f.run_df) for f in pooled.values() if f.runs > 1])
        for name, p in self.parameters.items():
            fit = pooled.get(p.law)
            if fit is None:
                continue
            d_run = fit.run_df if fit.runs > 1 else 0
            shrunk_run = (_POOL_DF * run + d_run * fit.log_run**2) / (_POOL_DF + d_run)
            shrunk_step = (_POOL_DF * step + fit.step_df * fit.log_step**2) / (_POOL_DF + fit.step_df)
            changes = {
                "log_run": rounded(shrunk_run**0.5),
                "run_df": _POOL_DF + d_run,
                "log_step": rounded(shrunk_step**0.5),
            }
            self.parameters[name] = p.model_copy(update=changes)


def _weighted_variance(spreads: list[tuple[float, int]]) -> float:
    return sum(df * sd**2 for sd, df in spreads) / sum(df for _, df in spreads)


def rounded(value: float) -> float:
    """Seven significant digits: enough for any use, and the same on every machine."""
    return float(f"{value:.7g}")
