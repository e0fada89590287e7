"""Segments: the files that the spool is made of, each of them one batch for the service.

A segment is sealed when its sending begins, and no other process appends to it. So a restarted process sends the
same batch, with the same idempotency key; and a line torn by a crash is always the last of its file.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from . import lines
from .folder import sync_folder, write_all


@dataclass(slots=True, eq=False)
class Segment:
    """Records that are sent and removed together; in memory, without a path, where the disk failed."""

    path: Path | None
    size: int = 0
    count: int = 0
    in_flight: bool = False
    held: list[bytes] = field(default_factory=list)
    """lines of a segment in memory"""

    def add(self, size: int, count: int) -> None:
        """Count what was written to it."""
        self.size += size
        self.count += count

    def hold(self, batch: list[bytes]) -> None:
        """Add lines in memory."""
        self.held += batch
        self.add(sum(map(len, batch)), len(batch))

    def read(self) -> list[bytes]:
        """The records that are whole.

        Raises:
            OSError: the file cannot be read.
        """
        found = self.held if self.path is None else lines.split(self.path.read_bytes())
        decoded = [lines.decode(line.rstrip(b"\n")) for line in found]
        return [record for record in decoded if record is not None]

    def remove(self) -> None:
        """Remove its file.

        Raises:
            OSError: the file is still there.
        """
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class SegmentWriter:
    """The open file of the segment that new records go to."""

    def __init__(self, segment: Segment) -> None:
        """Raises OSError if the file cannot be made."""
        assert segment.path is not None
        self.segment = segment
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(segment.path, flags, 0o644)
        try:
            sync_folder(segment.path.parent)
        except BaseException:
            self.close()
            raise

    def append(self, batch: list[bytes]) -> None:
        """Write lines and wait until they are on the disk.

        Raises:
            OSError: none of them is counted. Whole lines may be on the disk all the same, torn ones are cut off if
                that is possible; the segment must not be written to again.
        """
        data = b"".join(batch)
        try:
            write_all(self._file, data)
            os.fsync(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.segment.size)
            raise
        self.segment.add(len(data), len(batch))

    def close(self) -> None:
        """Seal the segment."""
        with contextlib.suppress(OSError):  # what matters was synced
            os.close(self._file)


def found(path: Path) -> Segment:
    """A segment that an earlier process left.

    Raises:
        OSError: the file cannot be read.
    """
    content = path.read_bytes()
    return Segment(path, size=len(content), count=lines.count(content))
