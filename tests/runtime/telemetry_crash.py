"""A trainer that is killed: submits steps, and at a chosen point of the client's work gets SIGKILL.

Usage: telemetry_crash.py URL SPOOL_DIR RUN_NAME POINT
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from telemetry_records import IMPATIENT, manifest, step

from pitstop_runtime.telemetry import TelemetryClient, folder, segments
from pitstop_runtime.telemetry.spool import Spool


def _before(owner: Any, name: str, skip: int, last_act: Callable[..., None] = lambda *_: None) -> None:
    """Die instead of calling a function, after ``skip`` calls of it."""
    original, calls = getattr(owner, name), 0

    def patched(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > skip:
            last_act(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(owner, name, patched)


def _write_most(file: int, data: bytes) -> None:
    """All but the end of the last line."""
    os.write(file, data[:-10])


POINTS: dict[str, Callable[[], None]] = {
    "any time": lambda: None,
    "folder half made": lambda: _before(folder, "sync_folder", 1),
    "half a line written": lambda: _before(segments, "write_all", 5, _write_most),
    "written, not synced": lambda: _before(os, "fsync", 9),
    "registered, id not kept": lambda: _before(Spool, "save_identity", 0),
    "stored, not removed": lambda: _before(segments.Segment, "remove", 1),
}


def main() -> None:
    url, spool_dir, name, point = sys.argv[1:]
    POINTS[point]()
    client = TelemetryClient(manifest(name), url, Path(spool_dir), options=IMPATIENT)
    for number in range(10_000):
        client.submit(step(number))
        time.sleep(0.001)


if __name__ == "__main__":
    main()
