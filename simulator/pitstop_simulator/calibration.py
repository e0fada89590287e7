"""A calibration: the parameters of the cost laws with their uncertainty, immutable and identified by content."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pitstop.errors import PitstopError
from pitstop.scenario import StrictModel

from .evidence import evidence_dir

CALIBRATION_SCHEMA_VERSION: Final = 1
CALIBRATION_FILE = "calibration.json"

Array = NDArray[np.float64]

WAITS = 64
"""Distinct waits of a switch that are drawn; a rank releases fewer communicators than half of that."""

_FEW_STEPS = 8
_STRATIFIED = 5000


class Parameter(StrictModel):
    """A positive parameter of a law, log-normal around ``median``.

    ``log_se`` is the estimate's uncertainty, ``log_run`` the spread between runs of one machine (with ``run_df``
    degrees of freedom: few runs give heavy tails), ``log_step`` the spread between steps of one run, all as standard
    deviations of the natural logarithm. ``log_hardware`` is the spread between machines, which applies only where the
    scenario's hardware is not that of the evidence.
    """

    law: str
    unit: str
    median: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    log_se: Annotated[float, Field(ge=0, le=5)]
    log_run: Annotated[float, Field(ge=0, le=5)] = 0.0
    run_df: Annotated[int, Field(ge=1)] = 1
    log_step: Annotated[float, Field(ge=0, le=5)] = 0.0
    log_hardware: Annotated[float, Field(ge=0, le=5)] = 0.0
    rows: Annotated[int, Field(ge=0)]
    source: str


class Ranges(StrictModel):
    """The measured range, from which support is judged."""

    gpus: list[str]
    world_size: tuple[int, int]
    ranks_per_gpu: tuple[int, int]
    nodes: tuple[int, int]
    communicators: tuple[int, int]
    saved_bytes: tuple[int, int]
    nccl: list[str]
    torch: list[str]


class Calibration(StrictModel):
    """All parameters, the measured range, and which evidence they came from."""

    schema_version: Literal[1] = CALIBRATION_SCHEMA_VERSION
    id: str
    evidence_digest: str
    row_ids: list[str]
    parameters: dict[str, Parameter]
    ranges: Ranges

    @classmethod
    def build(
        cls, evidence_digest: str, row_ids: list[str], parameters: dict[str, Parameter], ranges: Ranges
    ) -> Calibration:
        """Make a calibration; its id is a digest of its content."""
        unnamed = cls(
            id="", evidence_digest=evidence_digest, row_ids=row_ids, parameters=parameters, ranges=ranges
        )
        text = json.dumps(unnamed.model_dump(mode="json"), sort_keys=True)
        return unnamed.model_copy(update={"id": "cal-" + hashlib.sha256(text.encode()).hexdigest()[:12]})

    def agrees_with(self, other: Calibration) -> bool:
        """Same evidence, rows and parameters, up to what another version of the optimiser changes (1e-4 relative)."""
        if (self.evidence_digest, self.row_ids, self.ranges) != (
            other.evidence_digest,
            other.row_ids,
            other.ranges,
        ):
            return False
        if self.parameters.keys() != other.parameters.keys():
            return False
        pairs = ((self.parameters[name], other.parameters[name]) for name in self.parameters)
        return all(
            math.isclose(getattr(mine, field), getattr(theirs, field), rel_tol=1e-4, abs_tol=1e-6)
            for mine, theirs in pairs
            for field in ("median", "log_se", "log_run", "log_step", "log_hardware")
        )


class Draws:
    """Monte Carlo draws of all parameters: what a future run on the scenario's machine may look like.

    ``values[name]`` has shape (draws,). Latin hypercube sampling keeps the quantiles steady at a few hundred draws.
    The effect of a run is shared by the parameters of one law. Index 0 of every array is the median, without noise.
    """

    def __init__(self, calibration: Calibration, count: int, seed: int, *, foreign: bool, steps: int) -> None:
        rng = np.random.default_rng(seed)
        self.count = count
        self.steps = steps
        self.log_sd: dict[str, float] = {}
        self.log_run = {name: p.log_run for name, p in calibration.parameters.items()}
        self.log_step = {name: p.log_step for name, p in calibration.parameters.items()}
        self.values: dict[str, Array] = {}
        self._rng = rng
        laws = sorted({p.law for p in calibration.parameters.values()})
        run_effect = {law: self._normal() for law in laws}
        chi = {law: rng.random(count) for law in laws}
        for name in sorted(calibration.parameters):
            p = calibration.parameters[name]
            # A t-distributed run effect: the normal effect over the root of a chi-square mean of run_df terms.
            scale = np.sqrt(_chi_square_mean(chi[p.law], p.run_df, seed))
            fixed = float(np.hypot(p.log_se, p.log_hardware if foreign else 0.0))
            step = p.log_step / np.sqrt(steps)
            log = fixed * self._normal() + p.log_run * run_effect[p.law] / scale + step * self._normal()
            log[0] = 0.0
            self.values[name] = p.median * np.exp(log)
            self.log_sd[name] = float(np.sqrt(fixed**2 + p.log_run**2 + step**2))
        self._waits = self._mean_phases(WAITS)

    def _mean_phases(self, rows: int) -> Array:
        """Means of ``steps`` uniform phases, shape (rows, draws); normal by the central limit for many steps."""
        if self.steps <= _FEW_STEPS:
            means: Array = self._rng.random((self.steps, rows, self.count)).mean(axis=0)
        else:
            noise = self._rng.standard_normal((rows, self.count)) * np.sqrt(1 / 12 / self.steps)
            means = np.clip(0.5 + noise, 0, 1)
        means[:, 0] = 0.5
        return means

    def _normal(self) -> Array:
        return normal_hypercube(self._rng, self.count)

    def waits(self, first: int, count: int, period_s: float) -> Array:
        """Mean over the run's steps of waits for a tick of ``period_s`` with random phase; shape (count, draws).

        ``first`` numbers the wait, so that the same wait of the same draw is the same under every plan.
        """
        rows = np.arange(first, first + count) % len(self._waits)
        return np.asarray(self._waits[rows] * period_s)

    def take(self, index: NDArray[np.intp]) -> Draws:
        """The draws at ``index`` (with repetition), as after weighting by evidence."""
        taken = object.__new__(Draws)
        taken.count, taken.steps, taken._rng = len(index), self.steps, self._rng
        taken.log_sd, taken.log_run, taken.log_step = self.log_sd, self.log_run, self.log_step
        taken._waits = self._waits[:, index]
        taken.values = {name: value[index] for name, value in self.values.items()}
        return taken

    def __getitem__(self, name: str) -> Array:
        return self.values[name]


def _chi_square_mean(uniform: Array, df: int, seed: int) -> Array:
    """Chi-square(df)/df draws, deterministic for the seed; near 1 for many degrees of freedom."""
    rng = np.random.default_rng([seed, df])
    order = np.argsort(np.argsort(uniform))
    draws: Array = np.sort(rng.chisquare(df, size=uniform.size)) / df
    return np.maximum(draws[order], 0.05)


def normal_hypercube(rng: np.random.Generator, count: int) -> Array:
    """Standard normal draws, one from each of ``count`` strata of equal probability (a plain sample if many)."""
    if count > _STRATIFIED:  # so many draws need no strata
        return rng.standard_normal(count)
    uniform = (rng.permutation(count) + rng.random(count)) / count
    return inverse_normal(uniform)


def inverse_normal(p: Array) -> Array:
    """Quantiles of the standard normal distribution, from the standard library's implementation."""
    from statistics import NormalDist  # noqa: PLC0415 - only here

    quantile = NormalDist().inv_cdf
    return np.array([quantile(min(max(float(x), 1e-12), 1 - 1e-12)) for x in p])


def load_calibration(path: Path | None = None) -> Calibration:
    """The bundled calibration, or one from a file.

    Raises:
        PitstopError: the file is missing or damaged.
    """
    path = path or evidence_dir() / CALIBRATION_FILE
    try:
        return Calibration.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise PitstopError(f"{path}: not a usable calibration ({error}); run `pitstop calibrate`") from None
