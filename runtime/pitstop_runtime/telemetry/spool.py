"""The spool: records on disk from before they are sent until the service has acknowledged them.

At least once: a record is written and synced before it is sent, and its segment is removed after the last of its
records was acknowledged. A crash in between sends records again, which the service treats as duplicates. Where the
disk fails or another process holds the folder, segments stay in memory under the same cap, and go to the disk as
soon as it takes them.

One thread appends, one takes; both may call everything here, and nothing here raises ``OSError``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from .folder import Identity, RunFolder, load_identity, segment_paths
from .segments import Segment, SegmentWriter, found
from .stats import Counters, DropReason, QuietLog

DEFAULT_CAP_BYTES: Final = 64 * 1024**2
DEFAULT_SEGMENT_RECORDS: Final = 500
_LARGEST_SEGMENT = 4 * 1024**2  # a segment is sent as one body; the service takes 8 MiB by default
_SEGMENTS_PER_CAP = 8  # dropping the oldest segment costs at most an eighth of what is kept


class Spool:
    """The spool of one run, in ``folder``; in memory only if that is None."""

    def __init__(
        self,
        folder: Path | None,
        manifest: bytes,
        counters: Counters,
        log: QuietLog,
        *,
        cap_bytes: int = DEFAULT_CAP_BYTES,
        segment_records: int = DEFAULT_SEGMENT_RECORDS,
    ) -> None:
        self.manifest = manifest
        self._path, self._cap, self._segment_records = folder, cap_bytes, segment_records
        self._segment_bytes = max(1, min(_LARGEST_SEGMENT, cap_bytes // _SEGMENTS_PER_CAP))
        self._counters, self._log = counters, log
        self._ready = threading.Condition()
        self._segments: list[Segment] = []
        self._active: SegmentWriter | None = None
        self._folder: RunFolder | None = None
        self._identity = Identity()
        self._bytes = 0
        self._waiting = 0
        self._finished = False

    @property
    def waiting(self) -> int:
        """Records not acknowledged; read without the lock, so that a hanging disk holds nobody up."""
        return self._waiting

    @property
    def identity(self) -> Identity:
        """Who the run is at the service."""
        return self._identity

    def open(self) -> bool:
        """Take the folder over with what an earlier process left in it; False if that is not possible now."""
        with self._ready:
            if self._path is None or self._folder is not None:
                return self._folder is not None
            try:
                self._folder = RunFolder.open(self._path, self.manifest)
            except BlockingIOError:
                self._identity = load_identity(self._path) or self._identity
                return False
            except OSError as error:
                self._disk_failed("cannot be opened", error)
                return False
            if self._identity.run_id is None:
                self._identity = self._folder.identity
            else:  # registered while the folder could not be had
                self.save_identity(self._identity)
            self._recover()
            return True

    def _recover(self) -> None:
        assert self._folder is not None
        recovered = []
        for path in segment_paths(self._folder.path):
            try:
                segment = found(path)
                if segment.count == 0:
                    segment.remove()
                    continue
            except OSError as error:
                self._disk_failed(f"segment {path.name} cannot be read; it stays where it is", error)
                continue
            recovered.append(segment)
            self._bytes += segment.size
            self._waiting += segment.count
            self._counters.add(recovered=segment.count)
        self._segments[:0] = recovered
        self._ready.notify_all()

    def append(self, batch: Sequence[bytes]) -> None:
        """Take lines in; when this returns they are on the disk, or the disk failed and they are in memory."""
        with self._ready:
            if not self.open() and self._path is not None:
                self._log.report(
                    "unusable",
                    f"{self._path} cannot be written, or another client of the same run uses it: records wait in "
                    "memory. One client per run, on one rank; other runs need other manifests (started_at).",
                )
            self._rescue()
            for group in self._groups(batch):
                self._store(group)
            self._ready.notify_all()

    def _groups(self, batch: Sequence[bytes]) -> Iterator[list[bytes]]:
        """Cut a batch where segments end."""
        group = Segment(None)
        for line in batch:
            if group.count and not self._fits(group, len(line), 1):
                yield group.held
                group = Segment(None)
            group.hold([line])
        if group.count:
            yield group.held

    def _fits(self, segment: Segment, size: int, count: int) -> bool:
        return segment.size + size <= self._segment_bytes and segment.count + count <= self._segment_records

    def _store(self, group: list[bytes]) -> None:
        size, count = sum(map(len, group)), len(group)
        if not self._make_room(size):
            self._counters.drop(DropReason.SPOOL_FULL, count)
            self._log.report("cap", f"{count} records do not fit the spool's {self._cap} bytes: dropped")
            return
        if self._active is not None and not self._fits(self._active.segment, size, count):
            self._seal()
        if not self._write(group):
            last = self._segments[-1] if self._segments else None
            if last is None or last.path or last.in_flight or not self._fits(last, size, count):
                last = Segment(None)
                self._segments.append(last)
            last.hold(group)
        self._bytes += size
        self._waiting += count

    def _write(self, group: list[bytes]) -> bool:
        """Append to the active segment, or to a new one."""
        if self._folder is None:
            return False
        try:
            if self._active is None:
                self._active = SegmentWriter(Segment(self._folder.new_segment()))
                self._segments.append(self._active.segment)
            self._active.append(group)
        except OSError as error:
            self._disk_failed("cannot be written; records wait in memory", error)
            self._seal()
            return False
        return True

    def _rescue(self) -> None:
        """Write what is only in memory to the disk, if that is possible again."""
        for segment in [s for s in self._segments if s.path is None and not s.in_flight]:
            self._seal()
            if not self._write(segment.held):
                return
            self._segments.remove(segment)

    def _seal(self) -> None:
        if self._active is None:
            return
        self._active.close()
        if self._active.segment.count == 0:  # its only write failed
            self._unlink(self._active.segment)
            self._segments.remove(self._active.segment)
        self._active = None

    def _make_room(self, size: int) -> bool:
        """Drop the oldest segments that are not being sent."""
        while self._bytes + size > self._cap:
            victim = next((s for s in self._segments if not s.in_flight), None)
            if victim is None:
                return False
            if self._active is not None and victim is self._active.segment:
                self._seal()
            self._counters.drop(DropReason.SPOOL_FULL, victim.count)
            self._log.report(
                "cap",
                f"the spool is at its {self._cap} bytes: dropped the oldest {victim.count} records. "
                "See why the service does not take them.",
            )
            self._forget(victim)
        return True

    def _forget(self, segment: Segment) -> None:
        self._unlink(segment)
        self._segments.remove(segment)
        self._bytes -= segment.size
        self._waiting -= segment.count

    def _unlink(self, segment: Segment) -> None:
        try:
            segment.remove()
        except OSError as error:
            self._disk_failed("a segment cannot be removed; the next process sends it again", error)

    def take(self, timeout_s: float | None = None) -> Segment | None:
        """The oldest segment, to send; None if there is none in time, or none to come."""
        with self._ready:
            self._ready.wait_for(lambda: self._segments or self._finished, timeout_s)
            segment = next((s for s in self._segments if not s.in_flight), None)
            if segment is None:
                return None
            if self._active is not None and segment is self._active.segment:
                self._seal()
            segment.in_flight = True
            return segment

    def read(self, segment: Segment) -> list[bytes]:
        """The records of a taken segment; counts what is torn, corrupted or unreadable."""
        try:
            records = segment.read()
        except OSError as error:
            self._disk_failed("a segment cannot be read; it stays where it is", error)
            records, segment.path = [], None
        with self._ready:
            bad = segment.count - len(records)
            segment.count = len(records)
            self._waiting -= bad
        if bad > 0:
            self._counters.drop(DropReason.CORRUPTED, bad)
            where = segment.path.name if segment.path else "a segment"
            self._log.report("corrupted", f"{bad} torn or corrupted lines in {where}: skipped")
        elif bad < 0:  # a write that failed, and was kept in memory too, had reached the disk after all
            self._counters.add(recovered=-bad)
        return records

    def done(self, segment: Segment) -> None:
        """Remove a taken segment: the service has its records, or has refused them."""
        with self._ready:
            self._forget(segment)

    def release(self, segment: Segment) -> None:
        """Put a taken segment back."""
        with self._ready:
            segment.in_flight = False

    def save_identity(self, identity: Identity) -> None:
        """Keep who the run is at the service."""
        with self._ready:
            self._identity = identity
            if self._folder is not None:
                try:
                    self._folder.save_identity(identity)
                except OSError as error:
                    self._disk_failed("the run's identity cannot be kept", error)

    def refuse(self, refused: Sequence[bytes]) -> bool:
        """Keep refused records beside the segments; False if they are kept nowhere."""
        with self._ready:
            if self._folder is None:
                return False
            try:
                self._folder.refuse(refused, self._cap)
            except OSError as error:
                self._disk_failed("refused records cannot be kept", error)
                return False
            return True

    @property
    def finished(self) -> bool:
        """Whether nothing will be appended any more."""
        return self._finished

    def finish(self) -> None:
        """Nothing will be appended any more."""
        with self._ready:
            self._finished = True
            self._ready.notify_all()

    def close(self) -> None:
        """Let the folder go; what waits in it stays for the next process."""
        with self._ready:
            self._seal()
            if self._folder is not None:
                self._folder.close()
                self._folder = None
                self._path = None

    def _disk_failed(self, what: str, error: OSError) -> None:
        text = f"{self._path}: {what}: {error.strerror or error}"
        self._counters.fail(text)
        self._log.report(what, text)
