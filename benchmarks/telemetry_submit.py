"""What telemetry costs the trainer per step, against its budget of 1 ms: with the service up, and unreachable.

``submit`` is what the trainer waits for. ``beside`` is the processor time of the client's threads per record: at most
this much of the interpreter's time is missed by a trainer that runs Python code meanwhile; one that waits for the
GPU misses nothing. It is measured for records in quick succession, and for slow ones that are sent one by one.
"""

from __future__ import annotations

import argparse
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pitstop.components import Component, Phase
from pitstop.loading import load_scenario
from pitstop.plan import BASELINE
from pitstop.telemetry import MemoryRecord, PhaseRecord, ProcessCounts, RunManifest, StepRecord
from pitstop_runtime.telemetry import TelemetryClient

BUDGET_S = 1e-3
ROOT = Path(__file__).resolve().parents[1]
SCENARIO = load_scenario(ROOT / "examples" / "h200x2-tp2.yaml")


def record(number: int) -> StepRecord:
    """A record in which everything was measured."""
    seconds = dict.fromkeys(Component, 1.0 + number / 1e6)
    phase = PhaseRecord(
        total_s=11.0, components_s=seconds, fastest_s=seconds, slowest_ranks=dict.fromkeys(Component, 3)
    )
    return StepRecord(
        step=number,
        phases=dict.fromkeys(Phase, phase),
        step_s=60.0,
        memory=MemoryRecord(
            held_at_sync_bytes=2**30, held_in_rollout_bytes=2**30, process_at_sync_bytes=2**30
        ),
        slowest_rank=3,
        counts=ProcessCounts(communicators=11, sockets=40, threads=30),
        recorded_at=datetime.now(UTC),
    )


@contextmanager
def service(folder: Path) -> Iterator[str]:
    """The real service, in a process of its own."""
    command = [
        sys.executable,
        "-c",
        "from pitstop.cli import main; main()",
        "serve",
        "--port",
        "0",
        "--migrate",
    ]
    command += ["--database-url", f"sqlite:///{folder / 'pitstop.sqlite3'}"]
    log = folder / "service.log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            deadline = time.monotonic() + 60
            while not (found := re.search(r"http://[\d.]+:\d+", log.read_text())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the service did not start:\n{log.read_text()}")
                time.sleep(0.05)
            yield found[0]
        finally:
            process.terminate()


@contextmanager
def nobody() -> Iterator[str]:
    """An address that refuses connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds."""

    calls: list[float]
    beside: float
    """processor time of other threads, per record"""

    @property
    def p99(self) -> float:
        """99 of 100 calls take no longer."""
        return sorted(self.calls)[int(len(self.calls) * 0.99)]


def submit(client: TelemetryClient, numbers: range, pause_s: float) -> Cost:
    """Submit records and time the calls; the client's threads get a second more to finish."""
    calls = []
    beside = time.process_time() - time.thread_time()
    for number in numbers:
        item = record(number)
        start = time.perf_counter()
        client.submit(item)
        calls.append(time.perf_counter() - start)
        time.sleep(pause_s)
    time.sleep(1)
    return Cost(calls, (time.process_time() - time.thread_time() - beside) / len(numbers))


def measure(name: str, url: str, folder: Path, options: argparse.Namespace) -> bool:
    """Measure one case and print it; whether it is within the budget."""
    manifest = RunManifest(scenario=SCENARIO, plan=BASELINE, started_at=datetime.now(UTC))
    with TelemetryClient(manifest, url, folder / name) as client:
        time.sleep(1)
        quick = submit(client, range(options.calls), options.pause_s)
        slow = submit(client, range(options.calls, options.calls + options.slow_calls), options.slow_pause_s)
        client.close(30 if name == "up" else 0.5)
        stats = client.stats()
    print(
        f"service {name:<12} submit: median {statistics.median(quick.calls) * 1e6:5.1f} us, "
        f"p99 {quick.p99 * 1e6:5.1f} us, max {max(quick.calls) * 1e6:6.1f} us; "
        f"beside: {quick.beside * 1e3:.2f} ms in quick succession, {slow.beside * 1e3:.2f} ms one by one"
    )
    print(
        f"  submitted {stats.submitted}, sent {stats.sent}, in the spool {stats.spooled}, "
        f"dropped {stats.dropped_total}, retries {stats.retries}"
    )
    return quick.p99 < BUDGET_S and stats.dropped_total == 0


def main() -> int:
    """Measure both cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=3000, help="submits to time")
    parser.add_argument("--pause-s", type=float, default=0.001, help="seconds between two of them")
    parser.add_argument("--slow-calls", type=int, default=10, help="records submitted one by one")
    parser.add_argument("--slow-pause-s", type=float, default=1.2, help="seconds between two of them")
    options = parser.parse_args()
    cases: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
        "up": service,
        "unreachable": lambda _: nobody(),
    }
    within = True
    with tempfile.TemporaryDirectory(prefix="pitstop-benchmark-") as name:
        for case, address in cases.items():
            with address(Path(name)) as url:
                within &= measure(case, url, Path(name), options)
    print(f"budget of {BUDGET_S * 1e3:.0f} ms per step: {'kept' if within else 'EXCEEDED'}")
    return 0 if within else 1


if __name__ == "__main__":
    raise SystemExit(main())
