"""The spool: what was written before a crash is there after it, and nothing goes missing without being counted."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pitstop_runtime.telemetry import DropReason, lines
from pitstop_runtime.telemetry.folder import IDENTITY, MANIFEST, REFUSED, Identity, RunFolder, segment_paths
from pitstop_runtime.telemetry.spool import Spool
from pitstop_runtime.telemetry.stats import Counters, QuietLog

LOG = logging.getLogger("test")
MANIFEST_JSON = b'{"a":1}'


class Opened:
    """A spool with its counters; closed by the fixture."""

    def __init__(self, folder: Path | None, **options: Any) -> None:
        self.counters = Counters()
        self.spool = Spool(folder, MANIFEST_JSON, self.counters, QuietLog(LOG), **options)
        self.opened = self.spool.open()

    def append(self, *numbers: int) -> None:
        self.spool.append([lines.encode(record(number)) for number in numbers])

    def drain(self) -> list[int]:
        """Take everything, as if the service had acknowledged it."""
        found = []
        while segment := self.spool.take(0):
            found += [json.loads(item)["step"] for item in self.spool.read(segment)]
            self.spool.done(segment)
        return found

    @property
    def dropped(self) -> dict[DropReason, int]:
        return dict(self.counters.dropped)


Open = Callable[..., Opened]


def record(number: int) -> bytes:
    """Equally long for all numbers of two digits."""
    return json.dumps({"step": number, "note": "wörd"}, ensure_ascii=False).encode()


LINE = len(lines.encode(record(10)))


@pytest.fixture
def open_spool(tmp_path: Path) -> Iterator[Open]:
    made: list[Opened] = []

    def make(folder: Path | None = tmp_path / "run", **options: Any) -> Opened:
        made.append(Opened(folder, **options))
        return made[-1]

    yield make
    for opened in made:
        opened.spool.close()


def only_segment(folder: Path) -> Path:
    (path,) = segment_paths(folder)
    return path


def test_a_line_is_json_and_any_changed_byte_is_noticed() -> None:
    line = lines.encode(record(7))
    assert json.loads(line)["record"] == json.loads(record(7))
    assert lines.decode(line[:-1]) == record(7)
    for position in range(len(line) - 1):
        changed = bytearray(line[:-1])
        changed[position] ^= 1
        assert lines.decode(bytes(changed)) is None, position


def test_records_wait_for_the_next_process(open_spool: Open, tmp_path: Path) -> None:
    first = open_spool()
    first.append(1, 2)
    first.append(3)
    assert first.spool.waiting == 3
    first.spool.close()
    second = open_spool()
    assert second.opened
    assert (second.spool.waiting, second.counters.recovered) == (3, 3)
    second.append(4)
    assert second.drain() == [1, 2, 3, 4]
    assert second.spool.waiting == 0
    assert segment_paths(tmp_path / "run") == []
    assert (tmp_path / "run" / MANIFEST).read_bytes() == MANIFEST_JSON


def test_every_tear_costs_only_the_torn_line(open_spool: Open, tmp_path: Path) -> None:
    first = open_spool()
    first.append(1, 2)
    first.spool.close()
    path = only_segment(tmp_path / "run")
    whole = path.read_bytes()
    end_of_first = whole.index(b"\n") + 1
    for length in range(end_of_first, len(whole) - 1):
        path.write_bytes(whole[:length])
        torn = open_spool()
        segment = torn.spool.take(0)
        assert segment is not None
        assert torn.spool.read(segment) == [record(1)]
        assert torn.dropped.get(DropReason.CORRUPTED, 0) == (length > end_of_first)
        assert torn.spool.waiting == 1
        torn.spool.close()


def test_a_corrupted_line_is_skipped_counted_and_logged(
    open_spool: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_spool()
    first.append(1, 2, 3)
    first.spool.close()
    path = only_segment(tmp_path / "run")
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step": 9') + b"\x00\xff not json\n")
    second = open_spool()
    assert second.drain() == [1, 3]
    assert second.dropped == {DropReason.CORRUPTED: 2}
    assert second.counters.recovered == 4
    assert "2 torn or corrupted lines" in caplog.text


def test_the_cap_drops_the_oldest_and_counts(
    open_spool: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened = open_spool(cap_bytes=8 * LINE)  # a segment holds one record
    for number in range(10, 20):
        opened.append(number)
    opened.append(20, 21, 22)
    assert opened.dropped == {DropReason.SPOOL_FULL: 5}
    assert "dropped the oldest" in caplog.text
    assert opened.spool.waiting == 8
    assert sum(path.stat().st_size for path in segment_paths(tmp_path / "run")) == 8 * LINE
    assert opened.drain() == list(range(15, 23))
    assert segment_paths(tmp_path / "run") == []


def test_the_cap_holds_for_what_an_earlier_process_left(open_spool: Open) -> None:
    first = open_spool(segment_records=1)
    first.append(*range(10, 20))
    first.spool.close()
    second = open_spool(cap_bytes=4 * LINE)
    second.append(20)
    assert second.dropped == {DropReason.SPOOL_FULL: 7}
    assert second.drain() == [17, 18, 19, 20]


def test_what_is_being_sent_is_not_dropped(open_spool: Open) -> None:
    opened = open_spool(cap_bytes=8 * LINE)
    opened.append(10)
    sending = opened.spool.take(0)
    assert sending is not None
    for number in range(11, 19):
        opened.append(number)
    assert opened.dropped == {DropReason.SPOOL_FULL: 1}
    assert opened.spool.read(sending) == [record(10)]
    opened.spool.release(sending)
    assert opened.drain() == [10, *range(12, 19)]


def test_a_record_larger_than_the_cap_is_counted(open_spool: Open) -> None:
    spool = open_spool(cap_bytes=20)
    spool.append(1)
    assert spool.dropped == {DropReason.SPOOL_FULL: 1}
    assert spool.drain() == []


def test_segments_are_batches(open_spool: Open, tmp_path: Path) -> None:
    spool = open_spool(segment_records=3)
    spool.append(*range(7))
    spool.append(7)
    assert len(segment_paths(tmp_path / "run")) == 3
    taken = spool.spool.take(0)
    assert taken is not None
    assert len(spool.spool.read(taken)) == 3
    spool.spool.done(taken)
    assert spool.drain() == [3, 4, 5, 6, 7]


def test_a_second_user_of_the_folder_works_in_memory_until_it_is_free(
    open_spool: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_spool()
    first.spool.save_identity(Identity(first.spool.identity.namespace, "http://service", "the-id"))
    second = open_spool()
    assert not second.opened
    second.append(1)
    assert "another client" in caplog.text
    assert second.spool.identity.run_id == "the-id"
    assert segment_paths(tmp_path / "run") == []
    first.spool.close()
    second.append(2)
    second.spool.close()
    assert open_spool().drain() == [1, 2]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_hold_the_folder(open_spool: Open) -> None:
    """A data loader's worker may outlive the trainer, which is then killed without unlocking anything."""
    first = open_spool()
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"!")
        signal.pause()
        os._exit(0)
    try:
        os.read(ready, 1)
        first.spool.close()
        assert open_spool().opened
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)


class FullDisk:
    """``os.write`` that fails for files below a folder, after a part of the data."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self.part = False, 0
        self._folder, self._write = folder, os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, file: int, data: Any) -> int:
        if self.full and Path(f"/proc/self/fd/{file}").readlink().is_relative_to(self._folder):
            if self.part:
                written = self._write(file, bytes(data)[: self.part])
                self.part = 0
                return written
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(file, data)


@pytest.mark.parametrize("part", [0, 1, LINE - 1, LINE, LINE + 1])
def test_a_full_disk_moves_records_to_memory_and_back(
    part: int,
    open_spool: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = FullDisk(tmp_path, monkeypatch)
    first = open_spool()
    first.append(10)
    disk.full, disk.part = True, part
    first.append(11, 12)
    first.append(13)
    assert first.spool.waiting == 4
    assert "No space left" in caplog.text
    assert first.counters.last_error is not None
    assert "No space left" in first.counters.last_error
    on_disk = [path.stat().st_size for path in segment_paths(tmp_path / "run")]
    assert on_disk == [LINE]
    disk.full = False
    first.append(14)
    assert not first.counters.dropped
    first.spool.close()
    second = open_spool()
    assert sorted(second.drain()) == [10, 11, 12, 13, 14]
    assert not second.counters.dropped


def test_records_are_sent_from_memory_while_the_disk_is_full(
    open_spool: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(tmp_path, monkeypatch)
    opened = open_spool(cap_bytes=8 * LINE)
    disk.full = True
    for number in range(10, 20):
        opened.append(number)
    assert opened.dropped == {DropReason.SPOOL_FULL: 2}
    assert opened.drain() == list(range(12, 20))
    assert not opened.spool.refuse([b"{}\n"])


def test_a_failing_sync_is_a_failed_write(open_spool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_spool()
    opened.append(10)

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        opened.append(11)
    assert opened.drain() == [10, 11]


def test_a_folder_that_cannot_be_made(open_spool: Open, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    opened = open_spool(tmp_path / "file" / "run")
    assert not opened.opened
    opened.append(10)
    assert opened.spool.waiting == 1
    assert opened.drain() == [10]


def test_without_a_folder_records_are_in_memory(open_spool: Open) -> None:
    opened = open_spool(None, segment_records=2)
    opened.append(10, 11)
    opened.append(12)
    opened.append(13)
    assert opened.drain() == [10, 11, 12, 13]
    assert opened.counters.last_error is None


def test_an_unreadable_segment_is_counted_and_stays(open_spool: Open, tmp_path: Path) -> None:
    opened = open_spool()
    opened.append(10, 11)
    segment = opened.spool.take(0)
    assert segment is not None
    path = only_segment(tmp_path / "run")
    path.rename(path.with_suffix(".gone"))
    assert opened.spool.read(segment) == []
    opened.spool.done(segment)
    assert opened.dropped == {DropReason.CORRUPTED: 2}
    assert opened.spool.waiting == 0


def test_the_identity_survives_and_a_broken_one_is_replaced(open_spool: Open, tmp_path: Path) -> None:
    first = open_spool()
    kept = Identity(first.spool.identity.namespace, "http://service", "the-id", "lost-id")
    first.spool.save_identity(kept)
    first.spool.close()
    second = open_spool()
    assert second.spool.identity == kept
    second.spool.close()
    (tmp_path / "run" / IDENTITY).write_bytes(b'{"namespace"')
    third = open_spool()
    assert third.spool.identity.run_id is None
    assert third.spool.identity.namespace != kept.namespace


def test_a_run_registered_while_the_folder_was_in_use_stays_registered(open_spool: Open) -> None:
    first, second = open_spool(), open_spool()
    second.spool.save_identity(Identity(url="http://service", run_id="the-id"))
    first.spool.close()
    second.append(10)
    second.spool.close()
    assert open_spool().spool.identity.run_id == "the-id"


def test_refused_records_are_kept_up_to_a_limit(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "run", MANIFEST_JSON)
    try:
        folder.refuse([b"{}\n", b"{}\n"], limit=6)
        with pytest.raises(OSError, match="beyond 6 bytes"):
            folder.refuse([b"{}\n"], limit=6)
        assert (tmp_path / "run" / REFUSED).read_bytes() == b"{}\n{}\n"
    finally:
        folder.close()


def test_closing_twice_and_writing_after_it_raise_nothing(open_spool: Open) -> None:
    opened = open_spool()
    opened.spool.close()
    opened.spool.close()
    opened.append(10)
    assert opened.drain() == [10]
