"""The folder of one run below the spool: manifest, identity at the service, lock, segments, refused records.

<spool_dir>/<digest of the manifest>/
    manifest.json          what the run was registered with
    run.json               its identity: id at the service, and the namespace of its idempotency keys
    lock                   held by the process that uses the folder
    steps-00000001.jsonl   segments
    refused.jsonl          records that the service refused, with its reason
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import uuid
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
IDENTITY = "run.json"
REFUSED = "refused.jsonl"
_LOCK = "lock"
_SEGMENT = re.compile(r"^steps-(\d{8,})\.jsonl$")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a run is at the service.

    The namespace is drawn once per folder: equal manifests in two folders are two runs, and must not share
    idempotency keys; a restarted process must.
    """

    namespace: uuid.UUID = field(default_factory=uuid.uuid4)
    url: str = ""
    run_id: str | None = None
    lost: str | None = None
    """the id before this one, which the service no longer knows"""


def load_identity(folder: Path) -> Identity | None:
    """The identity kept in a folder, which another process may be using; None if there is none."""
    try:
        kept: dict[str, Any] = json.loads((folder / IDENTITY).read_bytes())
        return Identity(uuid.UUID(kept["namespace"]), kept["url"], kept["run_id"], kept["lost"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def segment_paths(folder: Path) -> list[Path]:
    """Segments of a folder, the oldest first."""
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _SEGMENT.match(path.name))]
    return [path for _, path in sorted(found)]


def leftovers(spool_dir: Path, own: str) -> Iterator[Path]:
    """Folders of other runs in which records wait."""
    with contextlib.suppress(OSError):
        for folder in sorted(spool_dir.iterdir()):
            if folder.name != own and (folder / MANIFEST).is_file() and segment_paths(folder):
                yield folder


class RunFolder:
    """A folder that this process holds."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock
        self._number = 0
        self.identity = Identity()

    @classmethod
    def open(cls, path: Path, manifest: bytes) -> RunFolder:
        """Make the folder, or take one over from a process that is gone.

        Raises:
            BlockingIOError: another process, or another client of this one, uses it.
            OSError: the disk does not allow it.
        """
        path.mkdir(parents=True, exist_ok=True)
        # Not lockf: its locks do not hold within one process, and closing any file on the lock would free it.
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder = cls(path, lock)
            folder._prepare(manifest)
        except BaseException:
            os.close(lock)
            raise
        _held.add(folder)
        return folder

    def _prepare(self, manifest: bytes) -> None:
        if not (self.path / MANIFEST).exists():
            write_atomically(self.path / MANIFEST, manifest)
        kept = load_identity(self.path)
        if kept is None:
            self.save_identity(self.identity)
        else:
            self.identity = kept
        self._number = max((_number(path) for path in segment_paths(self.path)), default=0)

    def save_identity(self, identity: Identity) -> None:
        """Keep an identity across restarts.

        Raises:
            OSError: it holds for this process only.
        """
        self.identity = identity
        document = {
            "namespace": str(identity.namespace),
            "url": identity.url,
            "run_id": identity.run_id,
            "lost": identity.lost,
        }
        write_atomically(self.path / IDENTITY, json.dumps(document).encode())

    def new_segment(self) -> Path:
        """The path of the next segment."""
        self._number += 1
        return self.path / f"steps-{self._number:08d}.jsonl"

    def refuse(self, lines: Iterable[bytes], limit: int) -> None:
        """Keep refused records for people to look at, up to ``limit`` bytes in all.

        Raises:
            OSError: they could not be kept.
        """
        target = os.open(self.path / REFUSED, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            data = b"".join(lines)
            if os.fstat(target).st_size + len(data) > limit:
                raise OSError(f"{REFUSED} would grow beyond {limit} bytes")
            write_all(target, data)
            os.fsync(target)
        finally:
            os.close(target)

    def close(self) -> None:
        """Let the folder go."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def write_all(file: int, data: bytes) -> None:
    """``os.write`` may write a part only."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old content or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(file, data)
        os.fsync(file)
    finally:
        os.close(file)
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make new names in a folder survive a power cut."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _number(path: Path) -> int:
    match = _SEGMENT.match(path.name)
    return int(match[1]) if match else 0


_held: weakref.WeakSet[RunFolder] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked child shares the lock: a data loader's worker that outlives the trainer would keep it locked."""
    for folder in list(_held):
        folder.close()


os.register_at_fork(after_in_child=_let_go_in_child)
