"""A throw-away PostgreSQL server, reachable over a unix socket only."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

_PATIENCE_S = 40


def find_binaries() -> Path | None:
    """The folder with initdb and postgres, or None."""
    candidates = []
    if shutil.which("pg_config"):
        found = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=False)
        candidates.append(Path(found.stdout.strip()))
    installed = Path("/usr/lib/postgresql")
    candidates += sorted(
        installed.glob("*/bin"), key=lambda p: int(p.parent.name.split(".")[0]), reverse=True
    )
    if on_path := shutil.which("initdb"):
        candidates.append(Path(on_path).parent)
    return next((c for c in candidates if (c / "initdb").exists() and (c / "postgres").exists()), None)


@dataclass(frozen=True)
class Postgres:
    """A running server."""

    folder: Path
    process: subprocess.Popen[bytes]

    def dsn(self, name: str) -> str:
        return f"host={self.folder} user=pitstop dbname={name}"

    def url(self, name: str) -> str:
        return f"postgresql+psycopg://pitstop@/{name}?host={self.folder}"

    def create(self, template: str | None = None) -> str:
        """Create a database, as a copy if a template is named, and return its name."""
        name = f"t_{uuid.uuid4().hex}"
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}" + (f" TEMPLATE {template}" if template else ""))
        return name


@contextmanager
def running(binaries: Path) -> Iterator[Postgres]:
    """Start a server in a new folder and remove both at the end."""
    folder = Path(
        tempfile.mkdtemp(prefix="pg-")
    )  # not pytest's: a socket's path may have 107 characters only
    who: dict[str, Any] = {}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        who = _unprivileged()
        os.chown(folder, who["user"], who["group"])
    common: dict[str, Any] = {"cwd": folder, "env": {"PATH": os.defpath, "LC_ALL": "C"}, **who}
    data, log = folder / "data", folder / "log"
    try:
        made = subprocess.run(
            [binaries / "initdb", "-D", data, "-U", "pitstop", "-A", "trust", "-E", "UTF8", "--no-sync"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
            **common,
        )
        assert made.returncode == 0, made.stderr
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": folder,
            "fsync": "off",
            "max_connections": 60,
            "shared_buffers": "32MB",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [binaries / "postgres", "-D", data, *options], stdout=output, stderr=output, **common
            )
        server = Postgres(folder, process)
        try:
            _wait(server, log)
            yield server
        finally:
            process.send_signal(signal.SIGINT)  # "fast": does not wait for clients
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged() -> dict[str, Any]:
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise AssertionError("running as root, and there is no unprivileged user to run PostgreSQL as")


def _wait(server: Postgres, log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            psycopg.connect(server.dsn("postgres")).close()
        except psycopg.OperationalError:
            died = server.process.poll() is not None
            assert not died, log.read_text()
            assert time.monotonic() < deadline, f"PostgreSQL does not answer: {log.read_text()}"
            time.sleep(0.05)
        else:
            return
