"""The telemetry client against the real service: every record that reached the spool is stored, once."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from telemetry_crash import POINTS
from telemetry_records import IMPATIENT, manifest, step
from telemetry_servers import (
    FakeServer,
    RealService,
    nobody,
    real_service,
    wait_until,
    well_behaved,
)

from pitstop.errors import InvalidInputError
from pitstop.telemetry import RunManifest, StepRecord
from pitstop_runtime.telemetry import DropReason, TelemetryClient, TelemetryStats, lines
from pitstop_runtime.telemetry.folder import REFUSED, segment_paths
from pitstop_runtime.telemetry.spool import Spool

pytestmark = pytest.mark.usefixtures("cheap_clients")


CRASH = Path(__file__).with_name("telemetry_crash.py")


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    with real_service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Every test has a run of its own in the shared service."""
    return str(request.node.name)[:100]


@pytest.fixture
def address() -> Iterator[str]:
    """Of no service."""
    with nobody() as found:
        yield found


MakeClient = Callable[..., TelemetryClient]


@pytest.fixture
def make_client(tmp_path: Path, name: str) -> Iterator[MakeClient]:
    made: list[TelemetryClient] = []

    def make(url: str | None, spool_dir: Path | None = tmp_path / "spool", **options: Any) -> TelemetryClient:
        run: RunManifest = options.pop("manifest", None) or manifest(name)
        made.append(TelemetryClient(run, url, spool_dir, **{"options": IMPATIENT, **options}))
        return made[-1]

    yield make
    for client in made:
        client.close(0)


def balanced(stats: TelemetryStats) -> bool:
    return (
        stats.submitted + stats.recovered == stats.queued + stats.spooled + stats.sent + stats.dropped_total
    )


def folders(spool_dir: Path) -> list[Path]:
    return sorted(spool_dir.iterdir())


def no_telemetry_threads() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("pitstop")]


def test_records_arrive_once_and_unchanged(
    shared_service: RealService, make_client: MakeClient, name: str, tmp_path: Path
) -> None:
    records = [step(number, seconds=number / 7) for number in range(30)]
    with make_client(shared_service.url) as client:
        for record in records:
            client.submit(record)
        assert client.close(20) == 0
    (run,) = shared_service.runs(name)
    assert list(shared_service.steps(run).values()) == records
    stats = client.stats()
    assert stats == TelemetryStats(
        submitted=30, recovered=0, queued=0, spooled=0, sent=30, dropped={}, retries=0, last_error=None
    )
    (folder,) = folders(tmp_path / "spool")
    assert segment_paths(folder) == []
    wait_until(no_telemetry_threads)


def test_a_restarted_client_continues_the_run(
    shared_service: RealService, make_client: MakeClient, name: str
) -> None:
    for first in (0, 10):
        with make_client(shared_service.url) as client:
            for number in range(first, first + 10):
                client.submit(step(number))
    (run,) = shared_service.runs(name)
    assert list(shared_service.steps(run)) == list(range(20))


def test_another_manifest_is_another_run(
    shared_service: RealService, make_client: MakeClient, name: str, tmp_path: Path
) -> None:
    for run_name in (name, f"{name}-2"):
        with make_client(shared_service.url, manifest=manifest(run_name)) as client:
            client.submit(step(1))
    assert len(folders(tmp_path / "spool")) == 2
    for run_name in (name, f"{name}-2"):
        (run,) = shared_service.runs(run_name)
        assert list(shared_service.steps(run)) == [1]


def test_what_other_runs_left_is_sent_when_idle(
    shared_service: RealService, make_client: MakeClient, name: str, tmp_path: Path
) -> None:
    with make_client(None, manifest=manifest(f"{name}-old")) as old:
        for number in range(5):
            old.submit(step(number))
    busy = make_client(None, manifest=manifest(f"{name}-busy"))
    busy.submit(step(0))
    wait_until(lambda: busy.stats().spooled == 1)
    client = make_client(shared_service.url)
    wait_until(lambda: client.stats().sent == 5)
    assert client.stats().recovered == 5
    (run,) = shared_service.runs(f"{name}-old")
    assert list(shared_service.steps(run)) == list(range(5))
    assert shared_service.runs(f"{name}-busy") == []
    assert len([folder for folder in folders(tmp_path / "spool") if segment_paths(folder)]) == 1


def test_records_wait_for_a_service_that_is_down(make_client: MakeClient, name: str, tmp_path: Path) -> None:
    with real_service(tmp_path) as service:
        service.stop()
        client = make_client(service.url)
        for number in range(20):
            client.submit(step(number))
        wait_until(lambda: client.stats().retries > 2)
        assert client.stats().spooled == 20
        assert client.stats().last_error is not None
        service.start()
        assert client.close(20) == 0
        (run,) = service.runs(name)
        assert list(service.steps(run)) == list(range(20))
        assert balanced(client.stats())


def test_closing_without_a_service_leaves_the_spool(
    make_client: MakeClient, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(address)
    for number in range(20):
        client.submit(step(number))
    wait_until(lambda: client.stats().spooled == 20)
    assert client.close(0.05) == 20
    assert "20 wait in the spool" in caplog.text
    assert client.close() == 20
    client.submit(step(99))
    assert client.stats().dropped == {DropReason.CLOSED: 1}
    assert balanced(client.stats())


def test_a_run_that_the_service_lost_is_registered_again(
    make_client: MakeClient, name: str, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with real_service(first) as service, real_service(second) as other:
        client = make_client(service.url)
        client.submit(step(1))
        wait_until(lambda: client.stats().sent == 1)
        service.stop()
        other.stop()
        service.database = other.database
        client.submit(step(2))
        client.submit(step(3))
        service.start()
        assert client.close(20) == 0
        (run,) = service.runs(name)
        assert list(service.steps(run)) == [2, 3]
        with make_client(service.url) as client:
            client.submit(step(4))
        assert list(service.steps(run)) == [2, 3, 4]


def test_refused_records_are_kept_with_the_reason_and_the_others_stored(
    shared_service: RealService,
    make_client: MakeClient,
    name: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with make_client(shared_service.url) as client:
        client.submit(step(3, seconds=1.0))
    client = make_client(None)
    wrong = step(7).model_copy(update={"step_s": -1.0, "slowest_rank": -2})
    for record in [step(1), step(2), step(3, seconds=2.0), step(4), step(4), wrong, step(8), step(9)]:
        client.submit(record)
    client.submit(step(8, seconds=3.0))
    client.close(20)
    client = make_client(shared_service.url)
    assert client.close(20) == 0
    (run,) = shared_service.runs(name)
    stored = shared_service.steps(run)
    assert sorted(stored) == [1, 2, 3, 4, 8, 9]
    assert stored[3] == step(3, seconds=1.0)
    assert stored[8] == step(8)
    stats = client.stats()
    assert stats.dropped == {DropReason.REFUSED: 3}
    assert stats.sent == 6
    assert balanced(stats)
    (folder,) = folders(tmp_path / "spool")
    refused = [json.loads(line) for line in (folder / REFUSED).read_text().splitlines()]
    assert {(item["record"]["step"], item["status"]) for item in refused} == {(3, 409), (7, 422), (8, 409)}
    (of_seven,) = [item["reason"] for item in refused if item["record"]["step"] == 7]
    assert "step_s: Input should be greater than or equal to 0" in of_seven
    assert "slowest_rank" in of_seven
    assert "different content" in refused[-1]["reason"]
    assert "records refused" in caplog.text


def test_a_manifest_that_the_service_refuses_leaves_the_records_in_the_spool(
    shared_service: RealService, make_client: MakeClient, name: str
) -> None:
    unknown = manifest(name).model_copy(update={"warmup_steps": -1})
    client = make_client(shared_service.url, manifest=unknown)
    client.submit(step(1))
    wait_until(lambda: client.stats().last_error)
    assert client.close(5) == 1
    assert "HTTP 422" in str(client.stats().last_error)
    assert not client.stats().dropped


def spooled_steps(spool_dir: Path) -> list[int]:
    """Numbers of the whole records that lie in the only folder of a spool."""
    if not spool_dir.exists() or not folders(spool_dir):
        return []
    found = [
        lines.decode(line)
        for path in segment_paths(folders(spool_dir)[0])
        for line in lines.split(path.read_bytes())
    ]
    return [json.loads(record)["step"] for record in found if record is not None]


def has_spooled(spool_dir: Path, number: int) -> bool:
    return len(spooled_steps(spool_dir)) >= number


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_trainer_loses_nothing_that_reached_the_spool(
    point: str, tmp_path: Path, make_client: MakeClient, shared_service: RealService, name: str
) -> None:
    spool_dir = tmp_path / "spool"
    arguments = [str(CRASH), shared_service.url, str(spool_dir), name, point]
    with subprocess.Popen([sys.executable, "-W", "error", *arguments]) as trainer:
        if point == "any time":
            wait_until(lambda: any(len(shared_service.steps(run)) > 30 for run in shared_service.runs(name)))
            trainer.kill()
        assert trainer.wait(20) == -signal.SIGKILL
    stored = {number for run in shared_service.runs(name) for number in shared_service.steps(run)}
    reached = stored.union(spooled_steps(spool_dir))
    assert reached == set(range(len(reached)))
    assert reached or point == "folder half made"

    client = make_client(shared_service.url)
    client.submit(step(20_000))
    assert client.close(20) == 0
    *lost, run = shared_service.runs(name)
    assert all(shared_service.steps(other) == {} for other in lost)
    assert len(lost) == (point == "registered, id not kept")
    assert shared_service.steps(run) == {number: step(number) for number in [*sorted(reached), 20_000]}
    assert client.stats().dropped == ({DropReason.CORRUPTED: 1} if point == "half a line written" else {})
    assert balanced(client.stats())


def test_a_run_killed_again_and_again(
    tmp_path: Path, make_client: MakeClient, name: str, shared_service: RealService, address: str
) -> None:
    """While the service is down, so that every process takes over the spool of the one before."""
    spool_dir = tmp_path / "spool"
    reached: list[int] = []
    for _ in range(2):
        arguments = [str(CRASH), address, str(spool_dir), name, "any time"]
        with subprocess.Popen([sys.executable, "-W", "error", *arguments]) as trainer:
            enough = len(reached) + 20
            wait_until(partial(has_spooled, spool_dir, enough))
            trainer.kill()
        reached = spooled_steps(spool_dir)
    client = make_client(shared_service.url)
    assert client.close(20) == 0
    (run,) = shared_service.runs(name)
    assert list(shared_service.steps(run)) == list(range(max(reached) + 1))
    assert client.stats().sent == client.stats().recovered == len(reached)


def test_a_resend_after_a_crash_carries_the_same_key(make_client: MakeClient, fake: FakeServer) -> None:
    fake.answer = lambda request: None if request.path.endswith("/steps") else well_behaved(request)
    first = make_client(fake.url)
    for number in range(5):
        first.submit(step(number))
    wait_until(fake.batches)
    first.close(0.05)
    wait_until(no_telemetry_threads)
    fake.answer = well_behaved
    assert make_client(fake.url).close(20) == 0
    keys = {(request.path, request.body, request.headers["idempotency-key"]) for request in fake.requests}
    assert len(keys) == len({(path, body) for path, body, _ in keys})
    assert len({request.headers["idempotency-key"] for request in fake.batches()}) < len(fake.batches())
    assert len([request for request in fake.requests if request.path == "/v1/runs"]) == 1


def test_the_queue_is_bounded_and_submit_does_not_wait(
    make_client: MakeClient,
    fake: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reached, disk, append = threading.Event(), threading.Event(), Spool.append

    def hanging(self: Spool, batch: Any) -> None:
        reached.set()
        disk.wait(20)
        append(self, batch)

    monkeypatch.setattr(Spool, "append", hanging)
    client = make_client(fake.url, queue_size=4)
    client.submit(step(0))
    wait_until(reached.is_set)
    for number in range(1, 11):
        client.submit(step(number))
    stats = client.stats()
    assert stats.submitted == 11
    assert stats.queued == 5  # with the one that the disk is busy with
    assert stats.dropped == {DropReason.QUEUE_FULL: 6}
    disk.set()
    assert client.close(20) == 0
    assert [number for request in fake.batches() for number in request.steps] == [0, 1, 2, 3, 4]
    assert "6 records dropped so far" in caplog.text
    assert "6 queue_full" in caplog.text
    assert balanced(client.stats())


def test_a_record_that_cannot_be_serialised_is_counted(
    make_client: MakeClient, fake: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(fake.url)
    client.submit(step(1).model_copy(update={"fallback": "\ud800"}))
    client.submit(None)  # type: ignore[arg-type]
    client.submit("no record")  # type: ignore[arg-type]
    client.submit(step(2))
    assert client.close(20) == 0
    assert client.stats().sent == 1
    assert client.stats().dropped == {DropReason.UNSERIALISABLE: 3}
    assert "cannot be serialised" in caplog.text
    assert balanced(client.stats())


def test_off_costs_nothing(make_client: MakeClient, tmp_path: Path) -> None:
    before = threading.active_count()
    with make_client(None, None) as client:
        client.submit(step(1))
        assert threading.active_count() == before
        assert client.close() == 0
    assert list(tmp_path.iterdir()) == []
    assert client.stats() == TelemetryStats(
        submitted=0, recovered=0, queued=0, spooled=0, sent=0, dropped={}, retries=0, last_error=None
    )


def test_without_a_service_records_are_kept_in_files(
    make_client: MakeClient, tmp_path: Path, fake: FakeServer, name: str
) -> None:
    with make_client(None) as client:
        for number in range(3):
            client.submit(step(number))
    assert client.stats().spooled == 3
    (folder,) = folders(tmp_path / "spool")
    documents = [json.loads(line) for path in segment_paths(folder) for line in path.read_text().splitlines()]
    assert [StepRecord.model_validate(document["record"]) for document in documents] == [
        step(n) for n in range(3)
    ]
    assert RunManifest.model_validate_json((folder / "manifest.json").read_bytes()) == manifest(name)
    assert make_client(fake.url).close(20) == 0
    assert [number for request in fake.batches() for number in request.steps] == [0, 1, 2]


def test_a_full_disk_does_not_stop_telemetry(
    make_client: MakeClient, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = os.write

    def full(file: int, data: bytes) -> int:
        if Path(f"/proc/self/fd/{file}").readlink().is_relative_to(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data)

    monkeypatch.setattr(os, "write", full)
    client = make_client(fake.url)
    for number in range(5):
        client.submit(step(number))
    assert client.close(20) == 0
    assert client.stats().sent == 5
    assert "No space left" in str(client.stats().last_error)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_report(make_client: MakeClient, fake: FakeServer) -> None:
    client = make_client(fake.url)
    client.submit(step(1))
    wait_until(lambda: client.stats().sent == 1)
    child = os.fork()
    if child == 0:
        client.submit(step(2))
        os._exit(client.close(20) + client.stats().submitted)
    assert os.waitpid(child, 0)[1] == 0
    client.submit(step(3))
    assert client.close(20) == 0
    assert [number for request in fake.batches() for number in request.steps] == [1, 3]


def test_a_trainer_that_ends_without_closing_has_its_records_sent(fake: FakeServer, tmp_path: Path) -> None:
    code = f"""
from telemetry_records import manifest, step
from pathlib import Path
from pitstop_runtime.telemetry import TelemetryClient
client = TelemetryClient(manifest(), {fake.url!r}, Path({str(tmp_path)!r}))
for number in range(50):
    client.submit(step(number))
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=CRASH.parent, check=False)
    assert done.returncode == 3
    assert sorted(number for request in fake.batches() for number in request.steps) == list(range(50))


@pytest.mark.parametrize("url", ["", "service:8000", "ftp://service", "http://", "http://[", 8000])
def test_an_unusable_address_is_refused_at_once(url: Any, make_client: MakeClient) -> None:
    with pytest.raises(InvalidInputError, match="Give one like"):
        make_client(url)


def test_the_client_needs_no_torch() -> None:
    code = "import sys, pitstop_runtime.telemetry, pitstop_runtime.recommendation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
