"""The Megatron-core releases that tests compare with, each run in a process of its own.

The installed one, and 0.19.2 in the directory that the environment variable ``PITSTOP_MEGATRON_019`` names. That
release declares Python >= 3.12, but its Python code runs on 3.11; ``make test`` installs its wheel into a directory
with ``pip install --target DIRECTORY --no-deps --ignore-requires-python --only-binary=:all:
--python-version 3.12``.

Without the variable, the tests with it are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Library:
    """One Megatron-core release; ``directory`` is where it was unpacked, None if it is installed."""

    version: str
    directory: str | None = None

    @property
    def has_gtp(self) -> bool:
        return self.version >= "0.19"

    def run(self, module: str, jobs: Iterable[Any], *arguments: str, timeout_s: float = 300) -> list[Any]:
        """Run a module of ``megatron_cpu`` with this release; one JSON document in and out per job."""
        path = [p for p in (self.directory, str(_TESTS)) if p]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", f"megatron_cpu.{module}", *arguments],
            input="".join(json.dumps(job) + "\n" for job in jobs),
            env=dict(
                os.environ, PYTHONPATH=os.pathsep.join(path), OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1"
            ),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines()]


def _installed() -> Any:
    if find_spec("torch") is None or find_spec("megatron") is None:
        return pytest.param(
            None, id="installed", marks=pytest.mark.skip("torch and megatron-core are not installed")
        )
    version = next(iter(distributions(name="megatron-core"))).version
    return pytest.param(Library(version), id=version)


def _unpacked() -> Any:
    directory = os.environ.get("PITSTOP_MEGATRON_019")
    if not directory or find_spec("torch") is None:
        skip = pytest.mark.skip(
            "PITSTOP_MEGATRON_019 names no directory with megatron-core 0.19 (see make test)"
        )
        return pytest.param(None, id="0.19", marks=skip)
    version = next(iter(distributions(name="megatron-core", path=[directory]))).version
    return pytest.param(Library(version, directory), id=version)


INSTALLED = _installed()
LIBRARIES = [INSTALLED, _unpacked()]
